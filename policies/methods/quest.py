"""Quest: read only the pages of keys that may hold what the query looks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from kvtune.lazy import lazy_import
from kvtune.policies.eviction import EvictorContext, Selector
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    LayerShape,
    Need,
    Paper,
    Saves,
    SelectionMethod,
    Serving,
)
from kvtune.types import Harm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import pages, topk
else:
    torch = lazy_import("torch")
    pages = lazy_import("kvtune.kernels.pages")
    topk = lazy_import("kvtune.kernels.topk")


class Quest(SelectionMethod):
    """Query-aware selection of pages (Quest, 2406.10774).

    For each page of `page_tokens` keys the least and the greatest value of each channel are held.
    A page's score for a query is the sum over channels of max(q min, q max), which no q k of the
    page exceeds. A step reads the latest page and the best others, `budget_tokens // page_tokens`
    pages in all. The first `dense_layers` layers read everything and hold no summaries.

    The paper selects per query head; here the scores of a KV head's group are reduced by
    `group_reduce`, so that the heads of a group read the same pages once. Summaries are those of
    the keys as they read back from the store, so that the bound holds under quantization.

    Summaries take 2 ceil(T / page_tokens) d elements of each KV head. A step reads them, and keys
    and values of the chosen tokens; it reads all keys and values, and no summaries, while the
    cache has no more pages than the budget. Prompts, and several tokens decoded at once, read
    everything.
    """

    name = "quest"
    title = "Quest"
    axis = Axis.SELECTION
    harm = Harm.LOSSY
    saves = (Saves.BANDWIDTH,)
    acts = "decode"
    needs = (Need.KERNEL,)
    serving = (
        REFERENCE,
        Serving("kvtune-plugin", "vLLM 0.32, --additional-config.kvtune.quest", platforms=("cpu",)),
    )
    paper = Paper(
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", "2406.10774", 2024
    )
    summary = (
        "Reads only the pages of keys that may match the query; frees no memory, holds 1/16 more, "
        "and misses what diffuse attention spreads over many pages."
    )

    page_tokens: int = Field(16, ge=1)
    budget_tokens: int = Field(1024, ge=2)
    dense_layers: int = Field(2, ge=0)
    group_reduce: Literal["max", "mean"] = "max"

    @model_validator(mode="after")
    def _two_pages(self) -> Self:
        if self.budget_tokens < 2 * self.page_tokens:
            raise ValueError(
                f"budget_tokens must hold the latest page and one more, {2 * self.page_tokens} "
                f"tokens, but is {self.budget_tokens}"
            )
        return self

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """What is stored is untouched."""
        return "plain"

    def selector(self, ctx: EvictorContext) -> Selector:
        """Build what chooses the pages of one layer."""
        return _Dense() if ctx.shape.index < self.dense_layers else _Pages(self)

    def index_bytes(self, tokens: int, layer: LayerShape) -> int:
        """Bytes of the least and greatest keys of all pages."""
        if layer.index < self.dense_layers:
            return 0
        numbers = 2 * layer.kv_heads * self._pages(tokens) * layer.key_dim
        return numbers * layer.element_bytes

    def selected_tokens(self, tokens: int, layer: LayerShape) -> int:
        """The latest page, which may be partly filled, and whole ones up to the budget."""
        held = self._pages(tokens)
        if layer.index < self.dense_layers or held <= self.budget_pages:
            return tokens
        return tokens - (held - self.budget_pages) * self.page_tokens

    @property
    def budget_pages(self) -> int:
        """How many pages a step reads, the latest one included."""
        return self.budget_tokens // self.page_tokens

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class _Dense(Selector):
    """Reads everything."""

    def append(self, keys: Tensor, unchanged_tokens: int) -> None:
        pass

    def rebuild(self, keys: Tensor) -> None:
        pass

    def choose(self, queries: Tensor, tokens: int) -> Tensor | None:
        return None

    def tensors(self) -> dict[str, Tensor]:
        return {}


class _Pages(Selector):
    """Least and greatest keys [Hk, pages, d] of one layer of one sequence."""

    def __init__(self, method: Quest) -> None:
        self.method = method
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def append(self, keys: Tensor, unchanged_tokens: int) -> None:
        if self.low is None or self.high is None:
            self.rebuild(keys)
            return
        whole = min(unchanged_tokens // self.method.page_tokens, self.low.shape[1])
        changed = keys[:, whole * self.method.page_tokens :]
        low, high = pages.page_bounds(changed, self.method.page_tokens)
        self.low = torch.cat((self.low[:, :whole], low), dim=1)
        self.high = torch.cat((self.high[:, :whole], high), dim=1)

    def rebuild(self, keys: Tensor) -> None:
        self.low, self.high = pages.page_bounds(keys, self.method.page_tokens)

    def choose(self, queries: Tensor, tokens: int) -> Tensor | None:
        size, budget = self.method.page_tokens, self.method.budget_pages
        if self.low is None or self.high is None or self.low.shape[1] <= budget:
            return None
        scores = pages.page_scores(queries, self.low, self.high, self.method.group_reduce)
        best = topk.top_indices(scores[:, :-1], budget - 1)
        within = torch.arange(size, device=best.device)
        old = (best[..., None] * size + within).flatten(1)
        latest = torch.arange(scores.shape[1] * size - size, tokens, device=best.device)
        return torch.cat((old, latest.expand(len(old), -1)), dim=1)

    def tensors(self) -> dict[str, Tensor]:
        if self.low is None or self.high is None:
            return {}
        return {"low": self.low, "high": self.high}
