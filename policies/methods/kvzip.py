"""KVzip: keep what the model needs to repeat its context, whatever will be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, choose_tokens
from kvtune.policies.method import Axis, History, LayerShape, Paper, Saves, TokenMethod
from kvtune.policies.sequence_method import Encode, SequenceMethod
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
LEAD_TOKENS = 8
SCORE_BYTES = 4


class KVzip(SequenceMethod):
    """Query-agnostic eviction after a prompt (KVzip, 2505.23416).

    The prompt is read in chunks of `chunk_tokens`; for each the model is told to repeat it and is
    given the chunk itself as its answer. (Later chunks are announced by the 8 tokens before them.
    Without a tokenizer those 8 tokens, and for the first chunk nothing, stand before the repeated
    chunk.) A token's score in a KV head is the greatest probability that any query of the pass and
    any head of the group gives it, in a softmax over the sinks and protected tokens, the tokens of
    its chunk, and the pass itself.

    `mode: pair` keeps the best `kept_ratio` of all (layer, KV head, token) triples together:
    floor(kept_ratio L Hk T), heads of different lengths. `pair-uniform` keeps the best
    floor(kept_ratio T) tokens of each head, which engines with one block table can hold. The first
    `sink_tokens` and protected tokens count but never go, even where they exceed the ratio. With
    proportional fairness the budget is shared among spans; scores are not span-local.

    Only the first prompt of a sequence is compressed; later ones, questions say, are kept whole.
    What is kept depends on this prompt and not on what is asked later, so that it can be shared:
    as a whole, under the fingerprint, among prompts with the same protected spans. A prefix of it
    cannot, since what is kept of the prefix depends on the rest.

    Scoring reads the prompt again (about twice the work of a prefill), while the whole prompt is
    held in full precision, with 4 B of score a token and KV head. Afterwards only 4 B of position a
    kept token and KV head remain. The paper's table of head lengths, 4 (Hk + 1) B a layer, is not
    held here: each head has its own tensors.
    """

    name = "kvzip"
    title = "KVzip"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "prefill"
    paper = Paper(
        "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", "2505.23416", 2025
    )
    summary = (
        "Keeps the tokens that the model needs to repeat its context, for any later question; "
        "costs about two more prefills, which pay where a context is used several times."
    )

    kept_ratio: float = Field(0.3, gt=0, le=1)
    mode: Literal["pair", "pair-uniform"] = "pair"
    chunk_tokens: int = Field(2048, ge=1)
    sink_tokens: int = Field(4, ge=1)

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """Heads of different lengths in `pair` mode."""
        return "ragged" if self.mode == "pair" else "per-head"

    @property
    def uniform_variants(self) -> tuple[TokenMethod, ...]:
        """The same ratio in each head."""
        return (self.model_copy(update={"mode": "pair-uniform"}),) if self.mode == "pair" else ()

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Later questions do not change what is kept; see the class for what may be shared."""
        return "fingerprint"

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what scores the tokens of one layer."""
        return _Repeated(self)

    def history(self, seen: History, layer: LayerShape) -> History:
        """A mean of `kept_ratio` of the prompt, the sinks at least; what is generated stays.

        Protected tokens beyond the ratio are kept besides; the formula does not know them.
        """
        tokens = seen.at_once
        kept = max(self._share(tokens), min(self.sink_tokens, tokens))
        return History(kept, seen.appended)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """Scores do not outlive the prompt: 0."""
        return 0

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """The scores of one layer; those of all layers live together."""
        if not self._drops(prompt_tokens):
            return 0
        return SCORE_BYTES * layer.kv_heads * prompt_tokens

    def scoring_passes(
        self, prompt_ids: Sequence[int], encode: Encode | None, answer_ids: Sequence[int]
    ) -> list[list[int]]:
        """An order to repeat a chunk, and the chunk, for each chunk."""
        passes: list[list[int]] = []
        for start in range(0, len(prompt_ids), self.chunk_tokens):
            lead = list(prompt_ids[max(start - LEAD_TOKENS, 0) : start])
            if encode is not None:
                lead = [*encode(LATER if start else FIRST), *lead, *answer_ids]
            passes.append([*lead, *prompt_ids[start : start + self.chunk_tokens]])
        return passes if self._drops(len(prompt_ids)) else []

    def select_all(self, evictors: Sequence[Evictor]) -> list[Tensor | list[Tensor] | None]:
        """The best triples of the whole sequence, or the best tokens of each head."""
        scored = [cast(_Repeated, evictor) for evictor in evictors]
        if any(one.prompt is None for one in scored):
            return [None] * len(scored)
        kept = self._pairs(scored) if self.mode == "pair" else self._uniform(scored)
        for one in scored:
            one.prompt = None
        return kept

    def _drops(self, tokens: int) -> bool:
        return self.kept_ratio < 1 and tokens > self.sink_tokens

    def _share(self, count: int) -> int:
        # 0.29 * 100 is a hair below 29 in floating point.
        return int(Fraction(str(self.kept_ratio)) * count)

    def _uniform(self, scored: Sequence[_Repeated]) -> list[Tensor | list[Tensor] | None]:
        kept: list[Tensor | list[Tensor] | None] = []
        for one in scored:
            prompt = one.scored
            tokens = prompt.scores.shape[1]
            budget = max(self._share(tokens), int(prompt.forced.sum()))
            kept.append(
                None if budget >= tokens else self._best(prompt.scores, budget, prompt, repeats=1)
            )
        return kept

    def _pairs(self, scored: Sequence[_Repeated]) -> list[Tensor | list[Tensor] | None]:
        prompt = scored[0].scored
        together = torch.cat([one.scored.scores for one in scored])
        rows, tokens = together.shape
        budget = max(self._share(rows * tokens), rows * int(prompt.forced.sum()))
        if budget >= together.numel():
            return [None] * len(scored)
        flat = self._best(together.reshape(1, -1), budget, prompt, repeats=rows)[0]
        heads = rows // len(scored)
        each = [flat[flat // tokens == row] % tokens for row in range(rows)]
        return [each[first : first + heads] for first in range(0, rows, heads)]

    def _best(self, scores: Tensor, budget: int, prompt: _Scored, *, repeats: int) -> Tensor:
        return choose_tokens(
            scores,
            budget,
            forced=prompt.forced.repeat(1, repeats),
            positions=prompt.positions.repeat(1, repeats),
            spans=prompt.ctx.spans,
            fairness=self.fairness,
        )


class _Scored:
    """Scores [Hk, T] of a prompt, which tokens never go [1, T], and their positions [1, T]."""

    def __init__(self, seen: Seen, tokens: int, sink_tokens: int) -> None:
        self.ctx = seen.ctx
        self.positions = seen.key_positions[:1, :tokens]
        self.forced = seen.protected()[:1, :tokens].clone()
        self.forced[:, :sink_tokens] = True
        self.scores = torch.zeros(seen.keys.shape[0], tokens, device=seen.keys.device)
        self.passes = 0


class _Repeated(Evictor):
    def __init__(self, method: KVzip) -> None:
        self.method = method
        self.prompt: _Scored | None = None

    @property
    def scored(self) -> _Scored:
        assert self.prompt is not None
        return self.prompt

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        if phase != "scoring":
            return
        tokens = seen.keys.shape[1] - seen.queries.shape[1]
        if self.prompt is None:
            self.prompt = _Scored(seen, tokens, self.method.sink_tokens)
        start = self.prompt.passes * self.method.chunk_tokens
        chunk = torch.zeros(seen.keys.shape[1], dtype=torch.bool, device=seen.keys.device)
        chunk[start : min(start + self.method.chunk_tokens, tokens)] = True
        attended = chunk.clone()
        attended[:tokens] |= self.prompt.forced[0]
        attended[tokens:] = True
        some = replace(
            seen, keys=seen.keys[:, attended], key_positions=seen.key_positions[:, attended]
        )
        self.prompt.scores[:, chunk[:tokens]] = some.greatest_attention()[:, chunk[attended]]
        self.prompt.passes += 1

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        """Nothing: tokens are chosen for all layers together."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.prompt is None else {"scores": self.prompt.scores}
