"""The engine process's side: which pages a request holds, and which others may use them.

Published to the prefix cache, for other requests to use, is what is computed as in stock vLLM:

- Quest: a decode step attends to some pages, so what it writes is another thing than what a prompt
  of the same tokens would. A prompt is computed with all pages. Published is the prompt.
- Page eviction: what follows a first decision is computed with the pages that are left. Published
  is what comes before.
- StreamingLLM: the first `SinkWindow.exact_tokens` tokens see all that precedes them. Later pages
  stay the request's own; a hit on them would also hold more at once than requests are admitted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.evict.marks import Marks
from kvtune.engines.vllm.plugin.evict.orders import Eviction, runs


class PolicyManager(FullAttentionManager):  # type: ignore[misc]
    """`FullAttentionManager` for a `PolicySpec`."""

    def __init__(self, kv_cache_spec: Any, **stock: Any) -> None:
        self.sink_window = kv_cache_spec.sink_window
        if self.sink_window is not None:
            stock["max_admission_blocks_per_request"] = self.sink_window.blocks_per_request(
                kv_cache_spec.max_in_flight_tokens
            )
            counters().add("evicted_tokens", 0, cause="window")
        super().__init__(kv_cache_spec, **stock)
        self.decodes_sparsely = kv_cache_spec.asked.quest is not None
        self.page_budget = kv_cache_spec.asked.page_budget(kv_cache_spec.block_size)
        # By request, kept by `evict.connector`; and the pages that left those that run.
        self.evictions: Mapping[str, Sequence[Eviction]] = {}
        self.evicted: dict[str, int] = {}
        if self.page_budget is not None:
            counters().add("evicted_tokens", 0, cause="score")
        # A session that goes on counts its earlier answers among the prompt; they stay what they
        # were, so what was the prompt at first is remembered for as long as the pages are held.
        self.first_prompt_tokens: dict[str, int] = {}
        self.dropped_ends: dict[str, int] = {}
        # What became of prompts is counted as requests end. With a prefix cache only, as vLLM
        # tells a manager of no request otherwise.
        self.requests: dict[str, Any] = {}
        self.spans: Marks | None = None
        if self.sink_window is not None and self.enable_caching:
            self.spans = Marks(kv_cache_spec.asked.protect.prefix_tokens, self.block_size)

    def publishable_tokens(self, request: Any, num_tokens: int) -> int:
        """How many of a request's first `num_tokens` others may use the pages of."""
        first_prompt = self.first_prompt_tokens.setdefault(
            request.request_id, request.num_prompt_tokens
        )
        if self.decodes_sparsely:
            num_tokens = min(num_tokens, first_prompt)
        if evictions := self.evictions.get(request.request_id):
            num_tokens = min(num_tokens, evictions[0].first_token)
        if self.sink_window is not None:
            num_tokens = min(num_tokens, self.sink_window.exact_tokens)
        return num_tokens

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publish the whole pages among the first `num_tokens` that others may use."""
        if self.spans is not None:
            self.requests[request.request_id] = request
        super().cache_blocks(
            request,
            self.publishable_tokens(request, num_tokens),
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what nothing sees any more after so many settled tokens."""
        if request_id not in self.req_to_blocks:
            return
        for eviction in reversed(self.evictions.get(request_id, ())):
            if eviction.first_token <= processed_computed_tokens:
                self._evict(request_id, eviction.mask)
                break
        if self.sink_window is None:
            return
        first, end = self.sink_window.dropped_blocks(processed_computed_tokens)
        gone = end - self.dropped_ends.get(request_id, first)
        if gone > 0:
            self._remove_blocks_in_range(request_id, first, end)
            self.dropped_ends[request_id] = end
            counters().add("evicted_tokens", gone * self.block_size, cause="window")

    def _evict(self, request_id: str, mask: int) -> None:
        """Free those pages of `mask` that are still held."""
        before = self.evicted.get(request_id, 0)
        gone = mask & ~before
        for first, end in runs(gone):
            self._remove_blocks_in_range(request_id, first, end)
        self.evicted[request_id] = before | gone
        counters().add("evicted_tokens", gone.bit_count() * self.block_size, cause="score")

    @classmethod
    def find_longest_cache_hit(cls, *, max_length: int, **stock: Any) -> Any:
        """Reuse no more than leaves the queries to compute that page eviction needs."""
        spec = stock["kv_cache_spec"]
        budget = spec.asked.page_budget(spec.block_size)
        if budget is not None:
            max_length = min(max_length, budget.reusable_tokens(max_length + 1))
        return super().find_longest_cache_hit(max_length=max_length, **stock)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request and hand back its pages."""
        self.evicted.pop(request_id, None)
        self.first_prompt_tokens.pop(request_id, None)
        dropped_end = self.dropped_ends.pop(request_id, 0)
        request = self.requests.pop(request_id, None)
        if self.spans is not None and request is not None and request.is_finished():
            first = self.sink_window.sink_blocks
            self.spans.end(request, (1 << max(dropped_end, first)) - (1 << first))
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks
