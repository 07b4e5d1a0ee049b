"""TOVA: drop the token that the newest one looks at least."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
from kvtune.policies.method import Axis, History, LayerShape, Paper, Saves, TokenMethod
from kvtune.types import Harm

if TYPE_CHECKING:
    from torch import Tensor

SCORE_BYTES = 4


class Tova(TokenMethod):
    """Hold at most `budget_tokens` in each layer, the same for all of its heads.

    A token's score is the attention that it gets from the newest token, averaged over all query
    heads. At the end of the prompt the best stay; from then on each new token takes the place of
    the one that it looks at least, which may be itself. No scores are held between steps.

    With proportional fairness the budget is shared among the spans; scores stay those of the newest
    token, wherever it stands.
    """

    name = "tova"
    title = "TOVA"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    paper = Paper("Transformers are Multi-State RNNs", "2401.06104", 2024)
    summary = (
        "Holds what the newest token attends to, in a constant number of tokens; what only a later "
        "token needs is gone by then."
    )

    budget_tokens: int = Field(default=1024, ge=1)

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """One choice for all heads of a layer."""
        return "uniform"

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what looks at each newest token."""
        return _Newest(self, ctx)

    def history(self, seen: History, layer: LayerShape) -> History:
        """All tokens up to the budget; once some were dropped, what is left counts as one piece."""
        if seen.tokens <= self.budget_tokens:
            return seen
        return History(self.budget_tokens)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """Nothing is held between steps: 0."""
        return 0

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """A float32 score a token."""
        return SCORE_BYTES * prompt_tokens if prompt_tokens > self.budget_tokens else 0


class _Newest(Evictor):
    def __init__(self, method: Tova, ctx: EvictorContext) -> None:
        self.method = method
        self.spans = ctx.spans if method.fairness != "none" else ()
        self.passing: dict[str, Tensor] = {}

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        """Nothing adds up: only the latest attention counts."""

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        if seen.key_positions.shape[1] <= self.method.budget_tokens:
            return None
        newest = replace(
            seen, queries=seen.queries[:, -1:], query_positions=seen.query_positions[-1:]
        )
        scores = newest.attention_received().mean((0, 1))[None]
        self.passing = {"scores": scores}
        return choose_tokens(
            scores,
            self.method.budget_tokens,
            forced=seen.protected(),
            positions=seen.key_positions,
            spans=self.spans,
            fairness=self.method.fairness,
        )

    def scratch(self) -> dict[str, Tensor]:
        passing, self.passing = self.passing, {}
        return passing
