"""How much the end of a prompt attends to each of its tokens, added up as the prompt passes.

A query's softmax runs over what precedes it and does not change later, so the sum over the window's
queries can be taken chunk by chunk, and over the layers one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.kernels.scores import attention_probs

BLOCK_WEIGHTS = 1 << 24
"""Attention weights that are held at once, so that memory stays bounded in long prompts."""


def received(
    queries: Tensor, keys: Tensor, first_place: int, scale: float, softcap: float | None
) -> Tensor:
    """The attention that each key gets: summed over queries, mean over heads, [n] in float32.

    Args:
        queries: [m, Hq, d], of the tokens in places `first_place` and on.
        keys: [Hk, n, d], of all tokens from place 0 on.
        first_place: where in the request the first query stands.
        scale: factor of the logits.
        softcap: as in `kvtune.kernels.scores.attention_probs`.
    """
    count, heads, _ = queries.shape
    tokens = keys.shape[1]
    at_once = max(BLOCK_WEIGHTS // (heads * tokens), 1)
    places = torch.arange(tokens, device=keys.device)
    total = torch.zeros(tokens, device=keys.device)
    for start in range(0, count, at_once):
        block = queries[start : start + at_once].transpose(0, 1)
        asking = first_place + start + torch.arange(block.shape[1], device=keys.device)
        weights = attention_probs(
            block, keys, scale, mask=places <= asking[:, None], softcap=softcap
        )
        total += weights.sum(dim=(0, 1, 2)) / heads
    return total


@dataclass(frozen=True, slots=True)
class Look:
    """A row whose queries score in this step.

    `tokens`: those of its queries that lie in the window, as a slice of the step's. `first_place`:
    of the first of them in the request. `pages` [p]: all pages up to the last of them. `total` [n]:
    what the prompt's tokens received so far, to be added to.
    """

    tokens: slice
    first_place: int
    pages: Tensor
    total: Tensor

    def add(self, queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> None:
        """Add one layer's attention; `queries` [T, Hq, d] of the step, `keys` [Hk, >= n, d]."""
        asking = queries[self.tokens]
        end = self.first_place + len(asking)
        got = received(asking, keys[:, :end], self.first_place, scale, softcap)
        self.total[:end] += got
