"""Scissorhands: while decoding, drop the tokens that recent queries kept ignoring."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from kvtune.kernels import packing
from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
from kvtune.policies.method import Axis, History, LayerShape, Paper, Saves, TokenMethod
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import scores as score_kernels
else:
    torch = lazy_import("torch")
    score_kernels = lazy_import("kvtune.kernels.scores")

BLOCK_QUERIES = 32
"""Queries whose attention weights are held at once."""


class Scissorhands(TokenMethod):
    """Hold at most `budget_tokens` for each KV head by dropping `drop_tokens` when one is over.

    A query that sees t tokens marks each that gets less than 1/t of its attention. Once a layer
    holds more than its budget, the tokens with most marks from the last `window_tokens` queries go
    (the older of equals), so that budget - drop tokens are left; the last `recent_tokens` stay.
    `drop_tokens` is half of the budget where it is not set. This is the meaning of the paper's
    algorithm; as printed, its signs contradict each other. The marks are held exactly, a bit each:
    the paper's window of 400 queries adds 50 B to a token of a KV head.

    It acts while decoding: a prompt over the budget is cut by the first generated token. With a
    `layer_skew` of s, budgets grow in equal steps from 1 - s times `budget_tokens` in the first
    layer to 1 + s times in the last, the same in total: later layers attend less persistently.

    `group_reduce` joins the attention of the query heads of a KV head before it is compared. With
    proportional fairness the budget is shared among spans, but marks come from all queries.
    """

    name = "scissorhands"
    title = "Scissorhands"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "decode"
    paper = Paper(
        "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache "
        "Compression at Test Time",
        "2305.17118",
        2023,
    )
    summary = (
        "Holds a fixed number of tokens while decoding by dropping those that the latest queries "
        "ignored; it needs all attention weights and a bit a token for each of these queries."
    )

    budget_tokens: int = Field(default=2048, ge=2)
    window_tokens: int = Field(default=400, ge=1)
    recent_tokens: int = Field(default=10, ge=1)
    drop_tokens: int | None = Field(default=None, ge=1)
    layer_skew: float = Field(default=0.0, ge=0, lt=1)
    group_reduce: Literal["mean", "max"] = "mean"

    @model_validator(mode="after")
    def _check(self) -> Self:
        smallest = self.budget_tokens - round(self.budget_tokens * self.layer_skew)
        left = smallest - self._drop_of(smallest)
        if left < self.recent_tokens:
            raise ValueError(
                f"{left} tokens are left after a drop (in the layer with the smallest budget), "
                f"fewer than recent_tokens, which is {self.recent_tokens}"
            )
        return self

    def budget_of(self, layer: LayerShape) -> int:
        """Most tokens that a KV head of a layer holds."""
        if layer.layers == 1:
            return self.budget_tokens
        # Opposite layers differ from the mean by opposite numbers, and Python rounds these alike:
        # the sum over the layers is exact.
        place = 2 * layer.index - (layer.layers - 1)
        return self.budget_tokens + round(
            self.budget_tokens * self.layer_skew * place / (layer.layers - 1)
        )

    def left_of(self, layer: LayerShape) -> int:
        """Tokens that a KV head of a layer holds right after a drop."""
        budget = self.budget_of(layer)
        return budget - self._drop_of(budget)

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what holds the marks."""
        return _Marks(self)

    def history(self, seen: History, layer: LayerShape) -> History:
        """Everything up to the budget, then up and down between what a drop leaves and it."""
        budget, left = self.budget_of(layer), self.left_of(layer)
        since_first_drop = seen.tokens - max(seen.at_once, budget) - 1
        if since_first_drop < 0:
            return seen
        return History(left, since_first_drop % (budget - left + 1))

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """A bit for each held token of each KV head and query of the window."""
        held = self.history(seen, layer).tokens
        return layer.kv_heads * held * packing.packed_bytes(self.window_tokens, 1)

    def _drop_of(self, budget_tokens: int) -> int:
        return budget_tokens // 2 if self.drop_tokens is None else self.drop_tokens


class _Marks(Evictor):
    """Holds bits [Hk, n, ceil(w / 8)]: bit p mod w of a token is the mark of the query at p."""

    def __init__(self, method: Scissorhands) -> None:
        self.method = method
        self.bits: Tensor | None = None

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        window = self.method.window_tokens
        heads, held = seen.keys.shape[:2]
        marks = torch.zeros(heads, held, window, dtype=torch.uint8, device=seen.keys.device)
        if self.bits is not None:
            marks[:, : self.bits.shape[1]] = packing.unpack_bits(self.bits, 1, window)
        asked = seen.query_positions.shape[0]
        for start in range(max(asked - window, 0), asked, BLOCK_QUERIES):
            block = slice(start, start + BLOCK_QUERIES)
            positions = seen.query_positions[block]
            part = replace(seen, queries=seen.queries[:, block], query_positions=positions)
            marks[:, :, positions % window] = self._ignored(part).mT.to(torch.uint8)
        self.bits = packing.pack_bits(marks, 1)

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        assert self.bits is not None
        held = self.bits.shape[1]
        layer = seen.ctx.shape
        if held <= self.method.budget_of(layer):
            return None
        marks = packing.unpack_bits(self.bits, 1, self.method.window_tokens).sum(-1)
        recent = torch.arange(held, device=marks.device) >= held - self.method.recent_tokens
        forced = seen.protected() | recent
        # Turned around, since of equals the older one goes.
        kept = choose_tokens(
            -marks.flip(-1),
            self.method.left_of(layer),
            forced=forced.flip(-1),
            positions=seen.key_positions.flip(-1),
            spans=seen.ctx.spans,
            fairness=self.method.fairness,
        )
        return (held - 1 - kept).flip(-1)

    def survived(self, index: Tensor) -> None:
        assert self.bits is not None
        heads = torch.arange(len(self.bits), device=index.device)[:, None]
        self.bits = self.bits[heads, index]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.bits is None else {"bits": self.bits}

    def _ignored(self, seen: Seen) -> Tensor:
        """Which tokens get less than an even share of each query: bool [Hk, m, n]."""
        weights = score_kernels.reduce_group(
            seen.probabilities().transpose(1, 2), self.method.group_reduce
        )
        visible = seen.key_positions[:, None, :] <= seen.query_positions[:, None]
        return (weights * visible.sum(-1, keepdim=True) < 1) & visible
