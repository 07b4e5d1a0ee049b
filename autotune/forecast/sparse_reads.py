"""How many cached tokens a step reads under kvtune's plugin, as whole reads over all layers.

The pages are those that the plugin reads: StreamingLLM's by `SinkWindow`, page eviction's by
`PageBudget`, and Quest's latest page with the best others up to its budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtune.autotune.forecast.page_evicting import lost_pages
from kvtune.policies.model_shape import ModelShape
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.plugin_config import QuestConfig
from kvtune.policies.settings import Settings
from kvtune.policies.sink_window import SinkWindow


@dataclass(frozen=True, slots=True)
class SparseReads:
    """`quest` reads a part of what is kept, in all but a `dense_share` of the layers.

    Kept is what `sink_window` or `page_budget` says, or else everything. Pages hold `block_tokens`;
    the first `protected_tokens` and the latest page are read in any case, also beyond the budget.
    """

    block_tokens: int
    sink_window: SinkWindow | None = None
    quest: QuestConfig | None = None
    dense_share: float = 0.0
    protected_tokens: int = 0
    page_budget: PageBudget | None = None

    def kept(self, cached_tokens: int, more: int, prompt_tokens: int) -> int:
        """Tokens that a step can read which adds `more` to a cache of so many, its own included.

        `prompt_tokens` are those of the request's prompt.
        """
        gone = 0
        if self.sink_window is not None:
            first, end = self.sink_window.dropped_blocks(cached_tokens)
            gone = end - first
        elif self.page_budget is not None:
            gone = lost_pages(self.page_budget, prompt_tokens, cached_tokens)
        return cached_tokens + more - gone * self.block_tokens

    def decoded(self, cached_tokens: int, prompt_tokens: int) -> float:
        """Tokens that one decode step reads of a cache of so many and of its own token.

        A page's least and greatest keys take as much as one token's key and value. `prompt_tokens`
        are those of the request's prompt.
        """
        kept = self.kept(cached_tokens, 1, prompt_tokens)
        pages = -(-kept // self.block_tokens)
        budget = self._budget_pages(pages)
        if budget is None or pages <= budget:
            return kept
        chosen = kept - (pages - budget) * self.block_tokens
        return self.dense_share * kept + (1 - self.dense_share) * (chosen + pages)

    def _budget_pages(self, kept_pages: int) -> int | None:
        quest = self.quest
        if quest is None:
            return None
        least = -(-self.protected_tokens // self.block_tokens) + 1
        if quest.budget_tokens is not None:
            return max(-(-quest.budget_tokens // self.block_tokens), least)
        if quest.share is not None:
            # 0.07 * 100 is a little more than 7 in floating point.
            return max(math.ceil(quest.share * kept_pages - 1e-9), least)
        assert quest.pages is not None
        return max(quest.pages, least)


def sparse_reads(now: Settings, model: ModelShape | None) -> SparseReads | None:
    """What is read under these settings; None where all of it is."""
    quest = now.plugin.quest
    if quest is None and now.sink_window is None and now.page_budget is None:
        return None
    dense = 0.0
    if quest is not None and model is not None:
        dense = min(quest.dense_layers / model.layers, 1.0)
    protected = now.plugin.protect.prefix_tokens
    return SparseReads(now.block_tokens, now.sink_window, quest, dense, protected, now.page_budget)
