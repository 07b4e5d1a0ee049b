"""ChunkKV: keep or drop whole runs of tokens, the same in all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from kvtune.errors import BadInput
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
from kvtune.policies.query_window import QueryWindow
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

SCORE_BYTES = INDEX_BYTES = 4


class ChunkKV(TokenMethod):
    """Compress a prompt by whole chunks of tokens (ChunkKV, 2502.00299).

    With more than `budget_tokens` prompt tokens, the last `window_tokens` queries score all keys; a
    chunk's score is the attention of all heads to its `chunk_tokens` tokens. The best chunks and
    the window are kept. Chunks count from the first token, so that a chunk size that is a multiple
    of an engine's block frees whole blocks; the paper's is 10. The tokens between the last whole
    chunk and the window stay with the window, and take their room from the chunks: what is kept
    never exceeds the budget, and does not depend on the data.

    Layers share their choice in runs of `reuse_layers`: the first one of a run makes it. Runs are
    counted over all layers of the model. A chunk with a protected token is kept whole. With
    proportional fairness the kept chunks are shared among spans, a chunk belonging to the span of
    its first token; its score is not span-local, since the window is that of the whole prompt.

    While a layer is compressed it holds the window's queries and 4 B a token and query head of
    scores (the first of each run), and 4 B a kept chunk (every layer); afterwards nothing but what
    the engine counts: 4 B of position a token, for all heads together.
    """

    name = "chunkkv"
    title = "ChunkKV"
    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = (Saves.CAPACITY, Saves.BANDWIDTH)
    acts = "prefill"
    serving = (
        REFERENCE,
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.page_eviction",
            platforms=("cpu",),
        ),
    )
    paper = Paper(
        "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM "
        "Inference",
        "2502.00299",
        2025,
    )
    summary = (
        "Keeps whole runs of tokens that the prompt's end looks at, the same in all heads; weak "
        "where an answer needs a little of everything, and blind to later questions."
    )

    budget_tokens: int = Field(1024, ge=2)
    window_tokens: int = Field(32, ge=1)
    chunk_tokens: int = Field(10, ge=1)
    reuse_layers: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _a_chunk_fits(self) -> Self:
        if self.budget_tokens < self.window_tokens + self.chunk_tokens:
            raise ValueError(
                f"budget_tokens must hold the window and a chunk, "
                f"{self.window_tokens + self.chunk_tokens} tokens, but is {self.budget_tokens}"
            )
        return self

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """All heads keep the same tokens."""
        return "uniform"

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build the choice of one layer, tied to that of the run's first layer."""
        run = ctx.shape.index // self.reuse_layers
        shared = ctx.sequence.setdefault(("chunkkv", run), _Run(ctx.shape.index))
        shared.last_layer = ctx.shape.index
        return _Chunks(self, ctx.shape.index, shared)

    def kept_chunks(self, tokens: int) -> int:
        """How many chunks of a longer prompt than the budget stay."""
        return (self.budget_tokens - self.tail_tokens(tokens)) // self.chunk_tokens

    def tail_tokens(self, tokens: int) -> int:
        """The window, and what lies between it and the last whole chunk."""
        return self.window_tokens + (tokens - self.window_tokens) % self.chunk_tokens

    def history(self, seen: History, layer: LayerShape) -> History:
        """The prompt is compressed, what is generated stays."""
        tokens = seen.at_once
        if tokens <= self.budget_tokens:
            return seen
        kept = self.kept_chunks(tokens) * self.chunk_tokens + self.tail_tokens(tokens)
        return History(kept, seen.appended)

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """Nothing outlives the prompt: 0."""
        return 0

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """Queries and scores in the first layer of a run, the numbers of the kept chunks in all.

        A run whose first layer has a trained window is scored by another layer; this is not known
        here.
        """
        if prompt_tokens <= self.budget_tokens:
            return 0
        index = INDEX_BYTES * self.kept_chunks(prompt_tokens)
        if layer.index % self.reuse_layers:
            return index
        queries = self.window_tokens * layer.key_dim * layer.element_bytes
        return index + layer.query_heads * (queries + SCORE_BYTES * prompt_tokens)


class _Run:
    """The choice that a run of layers shares: numbers of chunks [k], int32."""

    def __init__(self, first_layer: int) -> None:
        self.first_layer = self.last_layer = first_layer
        self.chunks: Tensor | None = None


class _Chunks(Evictor):
    def __init__(self, method: ChunkKV, layer: int, run: _Run) -> None:
        self.method = method
        self.layer = layer
        self.run = run
        self.leads = run.first_layer == layer
        self.window = QueryWindow(method.window_tokens)
        self._scratch: dict[str, Tensor] = {}

    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        if self.leads and phase == "prefill":
            self.window.add(seen)

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        tokens = seen.key_positions.shape[1]
        if tokens <= self.method.budget_tokens:
            self.window.clear()
            return None
        if self.leads:
            scores = self.window.looking_at(seen).attention_received()
            self._scratch = {"scores": scores, **self.window.tensors()}
            self.window.clear()
            self.run.chunks = self._best(scores.sum((0, 1)), seen).to(torch.int32)
        chunks = self.run.chunks
        assert chunks is not None
        self._scratch["chunks"] = chunks
        if self.layer == self.run.last_layer:
            self.run.chunks = None
        return self._tokens(chunks, tokens)

    def scratch(self) -> dict[str, Tensor]:
        held, self._scratch = self._scratch, {}
        return held

    def tensors(self) -> dict[str, Tensor]:
        return self.window.tensors()

    def _best(self, scores: Tensor, seen: Seen) -> Tensor:
        """Numbers [k] of the chunks to keep for token scores [n]."""
        tokens, size = len(scores), self.method.chunk_tokens
        whole = tokens - self.method.tail_tokens(tokens)
        budget = self.method.kept_chunks(tokens)
        forced = seen.protected()[:1, :whole].reshape(1, -1, size).any(-1)
        if int(forced.sum()) > budget:
            raise BadInput(
                f"protected spans lie in {int(forced.sum())} chunks of {size} tokens, and a budget "
                f"of {self.method.budget_tokens} tokens keeps {budget}",
                fix="raise the budget, or protect less",
            )
        return choose_tokens(
            scores[:whole].reshape(1, -1, size).sum(-1),
            budget,
            forced=forced,
            positions=seen.key_positions[:1, :whole:size],
            spans=seen.ctx.spans,
            fairness=self.method.fairness,
        )[0]

    def _tokens(self, chunks: Tensor, tokens: int) -> Tensor:
        """Indices [1, m] of the tokens of the chunks, and of all after the last whole chunk."""
        size = self.method.chunk_tokens
        within = torch.arange(size, device=chunks.device)
        old = (chunks.long()[:, None] * size + within).flatten()
        first = tokens - self.method.tail_tokens(tokens)
        return torch.cat((old, torch.arange(first, tokens, device=chunks.device)))[None]
