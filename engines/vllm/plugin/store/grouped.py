"""KIVI's format in pages: keys in groups along tokens, which a whole page has to be there for.

A page of one head is its cells' bytes as one row: key codes, their ranges, value codes, theirs.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kvtune.errors import BadInput
from kvtune.kernels.packed_groups import PackedGroups
from kvtune.policies.methods.kivi import Kivi
from kvtune.policies.plugin_config import StoreConfig


class GroupedPages:
    """A format of pages of `tokens` tokens for heads of `width` channels."""

    def __init__(self, asked: StoreConfig, width: int, tokens: int) -> None:
        self.width, self.tokens = width, tokens
        self.formats: tuple[PackedGroups, PackedGroups] = (
            Kivi(bits=asked.bits_key).format("key"),
            Kivi(bits=asked.bits_value).format("value"),
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of a page of one head."""
        return sum(part.nbytes(self.tokens, self.width) for part in self.formats)

    @property
    def nbytes(self) -> int:
        """Bytes of a cell, of which a page has as many as tokens."""
        return -(-self.used_bytes // self.tokens)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return pages [n, tokens, nbytes] uint8 of keys and values [n, tokens, width]."""
        held = [
            tensor.flatten(1).view(torch.uint8)
            for part, x in zip(self.formats, (keys, values), strict=True)
            for tensor in part.encode(x).values()
        ]
        rows = torch.cat(held, dim=1)
        padding = self.tokens * self.nbytes - self.used_bytes
        return torch.nn.functional.pad(rows, (0, padding)).view(-1, self.tokens, self.nbytes)

    def decode(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, tokens, width] of pages [n, tokens, nbytes]."""
        rows, start, decoded = pages.flatten(1), 0, []
        for part, shapes in zip(self.formats, self._shapes, strict=True):
            held = {}
            for name, (kind, shape) in shapes.items():
                end = start + math.prod(shape) * kind.itemsize
                held[name] = rows[:, start:end].contiguous().view(kind).view(len(rows), *shape)
                start = end
            decoded.append(part.decode(held, self.width, dtype))
        return decoded[0], decoded[1]

    @functools.cached_property
    def _shapes(self) -> list[dict[str, tuple[torch.dtype, torch.Size]]]:
        """What each format names its tensors for one page, in the order in which they are held."""
        page = torch.zeros(1, self.tokens, self.width)
        return [
            {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in part.encode(page).items()}
            for part in self.formats
        ]


@functools.cache
def grouped_pages(asked: StoreConfig, width: int, tokens: int) -> GroupedPages:
    """The format that is `asked` for.

    Raises:
        BadInput: groups of keys would go over the edge of a page.
    """
    made = GroupedPages(asked, width, tokens)
    group = made.formats[0].group
    if group is not None and tokens % group:
        raise BadInput(
            f"kivi groups {group} tokens, and pages have {tokens}",
            fix=f"set --block-size to a multiple of {group}",
        )
    return made
