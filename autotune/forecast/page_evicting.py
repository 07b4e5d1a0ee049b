"""The scheduler of an engine that frees pages of a prompt once it is computed (page eviction)."""

from __future__ import annotations

from kvtune.autotune.forecast.gapped import GappedScheduler
from kvtune.engines.simulated import scheduler as engine
from kvtune.engines.simulated.blocks import BlockPool
from kvtune.policies.page_budget import PageBudget


def lost_pages(budget: PageBudget, prompt_tokens: int, tokens: int) -> int:
    """How many pages a request has lost that was computed up to so many `tokens`."""
    if tokens < prompt_tokens:
        return 0
    return budget.pages(prompt_tokens) - budget.kept(prompt_tokens)


class PageEvictingScheduler(GappedScheduler):
    """A prompt is admitted and computed with all of its pages, as in stock vLLM.

    Those that it does without are free when its first answered token is scheduled. Others may use
    what is computed before that, and all of a sequence that loses nothing. Of a prompt that loses
    pages, the end is not taken from the cache, as its queries are needed to rank pages.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, limits: engine.Limits, budget: PageBudget
    ) -> None:
        super().__init__(pool, block_tokens, limits)
        self._budget = budget
        self._sink_pages = budget.pages(budget.sink_tokens)

    def _gap(self, sequence: engine.Sequence) -> tuple[int, int]:
        lost = lost_pages(self._budget, sequence.prompt_tokens, sequence.computed_tokens)
        return self._sink_pages, self._sink_pages + lost

    def _exact_tokens(self, sequence: engine.Sequence) -> int:
        prompt = sequence.prompt_tokens
        return prompt if self._budget.evicts(prompt) else sequence.known_tokens

    def _most_blocks(self, sequence: engine.Sequence) -> None:
        return None

    def _hits(self, sequence: engine.Sequence) -> list[int]:
        reusable = self._budget.reusable_tokens(sequence.known_tokens)
        return super()._hits(sequence)[: reusable // self._block_tokens]
