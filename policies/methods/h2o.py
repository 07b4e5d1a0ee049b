"""H2O: keep the tokens that got most attention so far, and the latest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
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

DEFAULT_SHARE = 10
"""Heavy hitters and recent tokens are each one in so many of the prompt where no number is set."""
SUM_BYTES = 4


class H2O(TokenMethod):
    """Keep the `heavy_tokens` with the highest accumulated attention and the last `recent_tokens`.

    A token's score is the attention that it got, summed over all queries since it came
    (A_j += softmax(q k / sqrt(d))_j); each KV head ranks for itself. Survivors keep their scores
    and their positions. A number that is not set is a tenth of the prompt, as in the authors' demos
    (of all prompts that came so far). Protected tokens take their room from the heavy hitters.

    `normalise` divides a score by the number of queries that could see the token: otherwise old
    tokens win by age. `group_reduce` joins the query heads of a KV head: `mean`, or the `max` of
    their sums, for which a sum is held for each query head. With proportional fairness, attention
    counts within a span only, as if the other spans were not there.

    Tokens are dropped after a step's attention: a step reads the kept tokens and its own.
    """

    name = "h2o"
    title = "H2O"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "both"
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.page_eviction.method h2o",
            platforms=("cpu",),
        ),
    )
    paper = Paper(
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        "2306.14048",
        2023,
    )
    summary = (
        "Holds the tokens that got most attention and the latest ones; it needs all attention "
        "weights, which slows the prompt, and loses details that were not asked about yet."
    )

    heavy_tokens: int | None = Field(default=None, ge=0)
    recent_tokens: int | None = Field(default=None, ge=1)
    normalise: bool = False
    group_reduce: Literal["mean", "max"] = "mean"

    def heavy_of(self, prompt_tokens: int) -> int:
        """Heavy hitters kept after a prompt of this length."""
        return _number(self.heavy_tokens, prompt_tokens)

    def recent_of(self, prompt_tokens: int) -> int:
        """Recent tokens kept after a prompt of this length."""
        return _number(self.recent_tokens, prompt_tokens)

    def budget_of(self, prompt_tokens: int) -> int:
        """Tokens kept for each KV head after a prompt of this length."""
        return self.heavy_of(prompt_tokens) + self.recent_of(prompt_tokens)

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what sums attention up."""
        return _HeavyHitters(self)

    def history(self, seen: History, layer: LayerShape) -> History:
        """All tokens up to the budget."""
        budget = self.budget_of(seen.at_once)
        return seen if seen.tokens <= budget else History(budget)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """A float32 sum for each kept token: for each KV head, or for each query head (`max`)."""
        return SUM_BYTES * self._sums(layer) * self.history(seen, layer).tokens

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """The sums of the whole prompt, and the score of each KV head made from them."""
        if prompt_tokens <= self.budget_of(prompt_tokens):
            return 0
        return SUM_BYTES * (self._sums(layer) + layer.kv_heads) * prompt_tokens

    def _sums(self, layer: LayerShape) -> int:
        return layer.kv_heads if self.group_reduce == "mean" else layer.query_heads


class _HeavyHitters(Evictor):
    """Holds sums [Hk, 1 or g, n]: the mean of a group adds up over queries, its maximum does not.

    They cover the tokens seen so far; tokens that came since start at 0.
    """

    def __init__(self, method: H2O) -> None:
        self.method = method
        self.prompt_tokens = 0
        self.sums: Tensor | None = None
        self.passing: dict[str, Tensor] = {}

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        if phase == "prefill":
            self.prompt_tokens += seen.queries.shape[1]
        got = seen.attention_received(within_spans=self.method.fairness != "none")
        if self.method.group_reduce == "mean":
            got = got.mean(1, keepdim=True)
        if self.sums is not None:
            got[..., : self.sums.shape[-1]] += self.sums
        self.sums = got

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        assert self.sums is not None
        held = self.sums.shape[-1]
        budget = self.method.budget_of(self.prompt_tokens)
        if held <= budget:
            return None
        scores = score_kernels.reduce_group(self.sums, self.method.group_reduce)
        if self.method.normalise:
            scores /= seen.query_positions[-1] - seen.key_positions + 1
        if phase == "prefill":
            self.passing = {"sums": self.sums, "scores": scores}
        oldest_recent = held - self.method.recent_of(self.prompt_tokens)
        recent = torch.arange(held, device=scores.device) >= oldest_recent
        return choose_tokens(
            scores,
            budget,
            forced=seen.protected() | recent,
            positions=seen.key_positions,
            spans=seen.ctx.spans,
            fairness=self.method.fairness,
        )

    def survived(self, index: Tensor) -> None:
        assert self.sums is not None
        wide = index[:, None].expand(len(self.sums), self.sums.shape[1], -1)
        self.sums = self.sums.gather(-1, wide)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.sums is None else {"sums": self.sums}

    def scratch(self) -> dict[str, Tensor]:
        passing, self.passing = self.passing, {}
        return passing


def _number(wanted: int | None, prompt_tokens: int) -> int:
    return max(prompt_tokens // DEFAULT_SHARE, 1) if wanted is None else wanted
