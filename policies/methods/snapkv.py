"""SnapKV: keep the prompt tokens that the end of the prompt looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import (
    Evictor,
    EvictorContext,
    Seen,
    choose_tokens,
    span_members,
    split_budget,
)
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    History,
    LayerShape,
    Paper,
    Saves,
    Serving,
    TokenMethod,
)
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import scores as score_kernels
else:
    torch = lazy_import("torch")
    score_kernels = lazy_import("kvtune.kernels.scores")

SCORE_BYTES = 4


class SnapKV(TokenMethod):
    """Keep `budget_tokens` of the prompt: its last `window_tokens` and what those attended to most.

    A token's score is the attention that it got from the window's queries, summed, joined over the
    query heads of a KV head (`group_reduce`), then pooled over `kernel_tokens` neighbours, so that
    what stands beside an important token stays too. Each KV head ranks for itself; positions are
    kept. Prompts within the budget are left alone, and generated tokens are never dropped.

    With proportional fairness each span is scored as if it stood alone, by its own end: the window
    is shared among the spans as the budget is.
    """

    name = "snapkv"
    title = "SnapKV"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "prefill"
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.page_eviction.method snapkv",
            platforms=("cpu",),
        ),
    )
    paper = Paper(
        "SnapKV: LLM Knows What You are Looking for Before Generation", "2404.14469", 2024
    )
    summary = (
        "Holds the prompt tokens that the prompt's end attends to; questions that come later may "
        "find their answer gone, and generated tokens still add up."
    )

    budget_tokens: int = Field(default=2048, ge=1)
    window_tokens: int = Field(default=32, ge=1)
    kernel_tokens: int = Field(default=5, ge=1)
    pooling: Literal["avg", "max"] = "avg"
    group_reduce: Literal["mean", "max"] = "mean"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kernel_tokens % 2 == 0:
            raise ValueError(f"kernel_tokens must be odd but is {self.kernel_tokens}")
        if self.window_tokens > self.budget_tokens:
            raise ValueError(
                f"the window of {self.window_tokens} tokens is kept and must fit into "
                f"budget_tokens, which is {self.budget_tokens}"
            )
        return self

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what remembers the window's queries until the prompt ends."""
        return _Window(self, ctx)

    def history(self, seen: History, layer: LayerShape) -> History:
        """The prompt up to the budget, and all that was generated."""
        return History(min(seen.at_once, self.budget_tokens), seen.appended)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """Nothing stays after the prompt: 0."""
        return 0

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """The window's queries, and a float32 score a token of each KV head."""
        if prompt_tokens <= self.budget_tokens:
            return 0
        queries = layer.query_heads * self.window_tokens * layer.key_dim * layer.element_bytes
        return queries + SCORE_BYTES * layer.kv_heads * prompt_tokens


class _Window(Evictor):
    """Holds the last queries [Hq, w, d] of the prompt so far, and their positions.

    How long a span's share of the window is depends on the prompt's length; until its end, the
    whole window is held for each span that has begun.
    """

    def __init__(self, method: SnapKV, ctx: EvictorContext) -> None:
        self.method = method
        self.spans = ctx.spans if method.fairness != "none" else ()
        self.queries: Tensor | None = None
        self.positions: Tensor | None = None
        self.passing: dict[str, Tensor] = {}

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        if phase != "prefill":
            return
        queries, positions = seen.queries, seen.query_positions
        if self.queries is not None and self.positions is not None:
            queries = torch.cat((self.queries, queries), dim=1)
            positions = torch.cat((self.positions, positions))
        parts = span_members(positions, self.spans)
        last = _ends(parts, [self.method.window_tokens] * len(parts))
        self.queries, self.positions = queries[:, last], positions[last]

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        queries, asked_at = self.queries, self.positions
        self.queries = self.positions = None
        held = seen.key_positions.shape[1]
        if queries is None or asked_at is None or held <= self.method.budget_tokens:
            return None
        positions = seen.key_positions[0]
        parts = span_members(positions, self.spans)
        counts = [len(part) for part in parts]
        window = self.method.window_tokens
        # A span without a query in the window would be kept by luck.
        floor = 1 if window >= len(parts) else 0
        windows = split_budget(window, counts, [floor] * len(parts))
        ends = _ends(parts, windows)
        own = torch.isin(asked_at, positions[ends])
        asking = replace(seen, queries=queries[:, own], query_positions=asked_at[own])
        scores = self._scores(asking, parts, windows)
        self.passing = {"queries": asking.queries, "scores": scores}
        forced = seen.protected()
        forced[:, ends] = True
        return choose_tokens(
            scores,
            self.method.budget_tokens,
            forced=forced,
            positions=seen.key_positions,
            spans=self.spans,
            fairness=self.method.fairness,
        )

    def _scores(self, asking: Seen, parts: Sequence[Tensor], windows: Sequence[int]) -> Tensor:
        """Pooled attention [Hk, n] of what stands before the windows; 0 in the windows."""
        got = asking.attention_received(within_spans=bool(self.spans))
        got = score_kernels.reduce_group(got, self.method.group_reduce)
        scores = torch.zeros_like(got)
        for part, window in zip(parts, windows, strict=True):
            before = part[: len(part) - window]
            if len(before):
                scores[:, before] = score_kernels.pool1d(
                    got[:, before], self.method.kernel_tokens, self.method.pooling
                )
        return scores

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.queries is None else {"queries": self.queries}

    def scratch(self) -> dict[str, Tensor]:
        passing, self.passing = self.passing, {}
        return passing


def _ends(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The last `counts` indices of each part, ascending."""
    return (
        torch.cat([part[max(len(part) - n, 0) :] for part, n in zip(parts, counts, strict=True)])
        .sort()
        .values
    )
