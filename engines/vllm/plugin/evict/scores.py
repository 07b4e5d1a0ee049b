"""How much queries attend to each token, added up layer by layer and step by step.

A query's softmax runs over what it sees and does not change later, so sums over queries can be
taken chunk by chunk, and over the layers one by one. Keys are read back in blocks, once for what
the softmax divides by and once for the weights, so that no request is too long to be scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.evict.keys import KeyReader
from kvtune.kernels.scores import attention_logits

BLOCK_NUMBERS = 1 << 22
"""Attention weights, or numbers of the cache, that are held at once: 16 MiB in float32."""

BLOCK_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Keys:
    """A layer's keys: its `cache` and how to read it; and how the layer makes logits of them."""

    cache: Tensor
    reader: KeyReader
    scale: float
    softcap: float | None


def received(queries: Tensor, pages: Tensor, first_places: Tensor, keys: Keys) -> Tensor:
    """The attention that each token gets, summed over queries, mean over heads.

    Args:
        queries: [rows, Hq, m, d], of neighbouring tokens.
        pages: of each row from its first on, [rows, p]. Beyond a row's own they may be any.
        first_places: of a row's first query among the tokens of its pages, [rows].
        keys: of the layer.

    Returns:
        [rows, p * tokens per page] in float32; 0 for what no query sees.
    """
    total = torch.zeros(len(pages), pages.shape[1] * keys.reader.page_tokens, device=queries.device)
    for start in range(0, queries.shape[2], BLOCK_QUERIES):
        asking = queries[:, :, start : start + BLOCK_QUERIES]
        places = torch.arange(start, start + asking.shape[2], device=queries.device)
        _add(total, asking, pages, first_places[:, None] + places, keys)
    return total


def _add(total: Tensor, queries: Tensor, pages: Tensor, places: Tensor, keys: Keys) -> None:
    """Add to `total`, as `received` returns it, what queries in `places` [rows, m] give."""
    rows, heads, count, _ = queries.shape
    size = keys.reader.page_tokens
    # Weights of a page, or what is read of it, whichever is more.
    numbers = rows * max(heads * count * size, keys.cache[0].numel())
    tokens = max(BLOCK_NUMBERS // numbers, 1) * size
    seen = int(places.max()) // size + 1
    blocks = torch.split(torch.arange(seen * size, device=total.device), tokens)

    # The last block's is at hand when the second pass begins; mostly it is the only one.
    @lru_cache(maxsize=1)
    def logits(index: int) -> Tensor:
        block = blocks[index]
        theirs = pages[:, int(block[0]) // size : int(block[-1]) // size + 1]
        visible = block <= places[:, None, None, :, None]
        return attention_logits(
            queries,
            keys.reader.read(keys.cache, theirs),
            keys.scale,
            mask=visible,
            softcap=keys.softcap,
        )

    everything = range(len(blocks))
    norms = torch.stack([logits(each).logsumexp(-1) for each in everything]).logsumexp(0)
    for each in reversed(everything):
        weights = (logits(each) - norms[..., None]).exp_()
        total[:, blocks[each]] += weights.sum(dim=(1, 2, 3)) / heads


@dataclass(frozen=True, slots=True)
class Look:
    """Rows whose queries score in a step, each as many of them.

    `tickets`: of the rows. `tokens` [rows, m]: their queries among the step's. `first_places`
    [rows]: of the first ones, among the tokens of the row's `pages` [rows, p]. `places` [rows, p]:
    which pages of their requests these are. `held`: how many of them each row has. `got` [rows,
    p * tokens per page]: what these tokens received so far in this step.
    """

    tickets: list[int]
    tokens: Tensor
    first_places: Tensor
    pages: Tensor
    places: Tensor
    held: list[int]
    got: Tensor

    def add(self, queries: Tensor, keys: Keys) -> None:
        """Add one layer's attention; `queries` [T, Hq, d] are the step's."""
        asking = queries[self.tokens].transpose(1, 2)
        self.got.add_(received(asking, self.pages, self.first_places, keys))

    def results(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each row its ticket, its pages' places [n], and what their tokens got [n, tokens]."""
        by_page = self.got.view(*self.pages.shape, -1)
        for row, (ticket, held) in enumerate(zip(self.tickets, self.held, strict=True)):
            yield ticket, self.places[row, :held], by_page[row, :held]
