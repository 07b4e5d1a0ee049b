"""Bounds of the keys in each page of a paged cache, kept up to date as pages are written.

Quest (2406.10774) holds the least and the greatest value of each channel. Here the greatest of k
and the greatest of -k are held side by side: both only grow while a page fills, and a page's score
is one product with (max(q, 0), max(-q, 0)). They have the dtype of the keys, in which they are
exact, as they are values of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Writes:
    """Which tokens of a step go into which pages; the same in every layer.

    `tokens`: those that are no padding, [n]. `pages`: page numbers, [p]. `part`: which of `pages`
    each token goes into, [n]. `born`: which of `pages` start anew, [b].
    """

    tokens: Tensor
    pages: Tensor
    part: Tensor
    born: Tensor


def writes_of(slots: Tensor, page_tokens: int) -> Writes:
    """Group a step's tokens by page.

    Whoever writes the first token of a page owns it from then on; what it held before is another's.

    Args:
        slots: where each token goes, page * page_tokens + offset, [tokens]; negative is padding.
        page_tokens: tokens per page.
    """
    places, tokens = slots.sort()
    padding = int((slots < 0).sum())
    places, tokens = places[padding:], tokens[padding:]
    page = places // page_tokens
    is_first = page.diff(prepend=page.new_full((1,), -1)) != 0
    part = is_first.cumsum(0) - 1
    return Writes(tokens, page[is_first], part, part[places % page_tokens == 0])


class Summaries:
    """The bounds of one layer's keys.

    `bounds`: [kv_heads, pages, 2 d], channel by channel the greatest k, then the greatest -k. A
    page of which nothing is known has bounds that no other page's score exceeds.
    """

    def __init__(
        self, pages: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        unknown = torch.finfo(dtype).max
        self.bounds = torch.full((kv_heads, pages, 2 * width), unknown, dtype=dtype, device=device)

    def update(self, keys: Tensor, writes: Writes) -> None:
        """Take in a step's keys, [tokens, kv_heads, d]."""
        if not len(writes.pages):
            return
        written = keys[writes.tokens]
        both = torch.cat((written, -written), dim=-1)
        part = writes.part[:, None, None].expand_as(both)
        nothing = both.new_full((len(writes.pages), *both.shape[1:]), float("-inf"))
        new = nothing.scatter_reduce_(0, part, both, "amax").transpose(0, 1)
        old = self.bounds.index_select(1, writes.pages)
        if len(writes.born):
            old.index_fill_(1, writes.born, float("-inf"))
        self.bounds.index_copy_(1, writes.pages, old.maximum(new))
