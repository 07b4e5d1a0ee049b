"""The engine process's side: which pages a request holds, and which others may use them.

Only pages whose content is the exact function of their tokens are published to the prefix cache:

- Quest: a decode step attends to some pages, so what it computes from the second layer on is not
  exact. A prompt is computed with all of them. Published is the prompt.
- StreamingLLM: exact is what was computed before the first page left. By `SinkWindow` that is every
  token before `exact_tokens`, however the prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


class PolicyManager(FullAttentionManager):  # type: ignore[misc]
    """`FullAttentionManager` for a `PolicySpec`."""

    def __init__(self, kv_cache_spec: Any, **stock: Any) -> None:
        self.sink_window = kv_cache_spec.sink_window
        if self.sink_window is not None:
            stock["max_admission_blocks_per_request"] = self.sink_window.blocks_per_request(
                kv_cache_spec.max_in_flight_tokens
            )
        super().__init__(kv_cache_spec, **stock)
        self.decodes_sparsely = kv_cache_spec.asked.quest is not None
        # A session that goes on counts its earlier answers among the prompt; they stay what they
        # were, so what was the prompt at first is remembered for as long as the pages are held.
        self.first_prompt_tokens: dict[str, int] = {}

    def publishable_tokens(self, request: Any) -> int:
        """How many of a request's first tokens others may use the pages of."""
        limit = int(request.num_tokens)
        if self.decodes_sparsely:
            limit = min(
                limit,
                self.first_prompt_tokens.setdefault(request.request_id, request.num_prompt_tokens),
            )
        if self.sink_window is not None:
            limit = min(limit, self.sink_window.exact_tokens)
        return limit

    def cache_blocks(
        self,
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publish the whole pages among the first `num_tokens` that are exact."""
        super().cache_blocks(
            request,
            min(num_tokens, self.publishable_tokens(request)),
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what no step reads again once so many tokens are computed and settled."""
        if self.sink_window is not None:
            first, end = self.sink_window.dropped_blocks(processed_computed_tokens)
            self._remove_blocks_in_range(request_id, first, end)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request and hand back its pages."""
        self.first_prompt_tokens.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks
