"""R-KV: while a model reasons at length, drop what it neither looks at nor says anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
from kvtune.policies.method import Axis, History, LayerShape, Paper, Saves, TokenMethod
from kvtune.policies.query_window import QueryWindow
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import redundancy
    from kvtune.kernels import scores as score_kernels
else:
    torch = lazy_import("torch")
    redundancy = lazy_import("kvtune.kernels.redundancy")
    score_kernels = lazy_import("kvtune.kernels.scores")


class RKV(TokenMethod):
    """Redundancy-aware compression while decoding (R-KV, 2505.24133).

    Whenever `budget_tokens + buffer_tokens` tokens are held, the best `budget_tokens` stay: the
    last `window_tokens`, and of the others those with the greatest
    w importance - (1 - w) redundancy, w = `importance_weight`, each KV head for itself. Importance
    is the attention of the last `window_tokens` queries (logits at their maximum over the group,
    softmax over all keys a query sees, mean over queries, maximum over `pool_tokens` neighbours).
    Redundancy is the softmax over keys of the mean cosine of the other keys to a key, where the
    newest of several keys more alike than `similarity_threshold` is not counted as a copy.
    `centre_keys` compares keys after taking their mean off, which all keys share and which
    otherwise makes them all look alike.

    With `pin_prompt` the prompt, or what an evictor left of it, always stays and does not count
    for the budget. (The paper may drop prompt tokens; so does this without `pin_prompt`, from the
    first step on.) The paper leaves the window out of the softmax; here it is in. Fairness among
    spans shares the budget; the scores are not span-local, since the latest queries ask.

    Held besides the cache: the last min(window_tokens, T) queries of all query heads, and 4 B of
    position a token and KV head (from the first compression on; before it, a token). While
    compressing, cosines of 256 keys with all others are held at once.
    """

    name = "r-kv"
    title = "R-KV"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "decode"
    paper = Paper(
        "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", "2505.24133", 2025
    )
    summary = (
        "Bounds what a long chain of thought holds by dropping repeated and unread tokens; a pass "
        "over all pairs of keys at each compression, and detail from early steps is lost."
    )

    budget_tokens: int = Field(1024, ge=2)
    buffer_tokens: int = Field(128, ge=1)
    window_tokens: int = Field(8, ge=1)
    importance_weight: float = Field(0.1, ge=0, le=1)
    similarity_threshold: float = Field(0.5, ge=-1, le=1)
    pool_tokens: int = Field(7, ge=1)
    centre_keys: bool = False
    pin_prompt: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.budget_tokens <= self.window_tokens:
            raise ValueError(
                f"budget_tokens must exceed window_tokens ({self.window_tokens}) "
                f"but is {self.budget_tokens}"
            )
        if self.pool_tokens % 2 == 0:
            raise ValueError(f"pool_tokens must be odd but is {self.pool_tokens}")
        return self

    @property
    def full_tokens(self) -> int:
        """The number of tokens, pinned ones aside, at which the cache is compressed."""
        return self.budget_tokens + self.buffer_tokens

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what holds the latest queries of one layer."""
        return _Redundant(self)

    def history(self, seen: History, layer: LayerShape) -> History:
        """Between budget and budget + buffer tokens once the cache was full, besides the pinned."""
        pinned = seen.at_once if self.pin_prompt else 0
        first = max(1, self.full_tokens - (seen.at_once - pinned))
        if seen.appended < first:
            return seen
        return History(pinned + self.budget_tokens, (seen.appended - first) % self.buffer_tokens)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """The latest queries, never more than there are tokens."""
        queries = min(self.window_tokens, seen.tokens)
        return queries * layer.query_heads * layer.key_dim * layer.element_bytes


class _Redundant(Evictor):
    def __init__(self, method: RKV) -> None:
        self.method = method
        self.window = QueryWindow(method.window_tokens)
        self.prompts: list[range] = []

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        if phase == "scoring":
            return
        self.window.add(seen)
        if phase == "prefill":
            start, end = int(seen.query_positions[0]), int(seen.query_positions[-1]) + 1
            if self.prompts and self.prompts[-1].stop == start:
                start = self.prompts.pop().start
            self.prompts.append(range(start, end))

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        pinned = self._pinned(seen.key_positions)
        count = int(pinned.sum(-1).max())
        held = seen.key_positions.shape[1]
        if held - count < self.method.full_tokens:
            return None
        forced = pinned | seen.protected()
        forced[:, held - self.method.window_tokens :] = True
        return choose_tokens(
            self._scores(seen),
            count + self.method.budget_tokens,
            forced=forced,
            positions=seen.key_positions,
            spans=seen.ctx.spans,
            fairness=self.method.fairness,
        )

    def survived(self, index: Tensor) -> None:
        # The window is full again before anything is dropped here.
        self.window.shorten(index.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        return self.window.tensors()

    def _pinned(self, positions: Tensor) -> Tensor:
        mask = torch.zeros_like(positions, dtype=torch.bool)
        for prompt in self.prompts if self.method.pin_prompt else ():
            mask |= (positions >= prompt.start) & (positions < prompt.stop)
        return mask

    def _scores(self, seen: Seen) -> Tensor:
        """How much each token [Hk, n] is worth keeping; nothing for the window, which stays."""
        method = self.method
        importance = self._importance(seen)[:, : -method.window_tokens]
        pooled = score_kernels.pool1d(importance, method.pool_tokens, "max")
        copies = redundancy.key_redundancy(
            seen.keys, method.similarity_threshold, centre=method.centre_keys
        ).softmax(-1)
        weight = method.importance_weight
        scores = -(1 - weight) * copies
        scores[:, : -method.window_tokens] += weight * pooled
        return scores

    def _importance(self, seen: Seen) -> Tensor:
        """Attention [Hk, n] that the latest queries pay, by their greatest logit in a group."""
        asking, ctx = self.window.looking_at(seen), seen.ctx
        kv_heads, _, width = seen.keys.shape
        grouped = asking.queries.float().reshape(kv_heads, -1, asking.queries.shape[1], width)
        logits = grouped @ seen.keys.float().transpose(1, 2)[:, None] * ctx.scale
        if ctx.softcap is not None:
            logits = torch.tanh(logits / ctx.softcap) * ctx.softcap
        hidden = seen.key_positions[:, None, :] > asking.query_positions[:, None]
        attention: Tensor = logits.amax(1).masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
        return attention
