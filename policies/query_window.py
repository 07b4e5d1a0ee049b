"""The latest queries of a layer, held by methods that score tokens by what those look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Seen

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class QueryWindow:
    """The last `window_tokens` queries [Hq, <= window_tokens, d], over chunks and decode steps."""

    def __init__(self, window_tokens: int) -> None:
        self.window_tokens = window_tokens
        self.queries: Tensor | None = None
        self.positions: list[int] = []

    def add(self, seen: Seen) -> None:
        """Take the queries of one attention."""
        new = seen.queries[:, -self.window_tokens :]
        if self.queries is not None:
            new = torch.cat((self.queries, new), dim=1)[:, -self.window_tokens :]
        # A slice would keep all of the projections alive.
        self.queries = new.clone()
        self.positions += seen.query_positions[-self.window_tokens :].tolist()
        self.positions = self.positions[-self.window_tokens :]

    def looking_at(self, seen: Seen) -> Seen:
        """The window's queries attending to the keys of `seen`, which include their own."""
        assert self.queries is not None
        positions = torch.tensor(self.positions, device=seen.query_positions.device)
        return replace(seen, queries=self.queries, query_positions=positions)

    def shorten(self, tokens: int) -> None:
        """Hold the latest `tokens` queries at most."""
        if self.queries is not None and self.queries.shape[1] > tokens:
            self.queries = self.queries[:, -tokens:].clone()
            self.positions = self.positions[-tokens:]

    def clear(self) -> None:
        """Forget all queries."""
        self.queries, self.positions = None, []

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by name."""
        return {} if self.queries is None else {"queries": self.queries}
