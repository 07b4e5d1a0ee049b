"""How many pages of a prompt stay when an engine drops whole pages of it, and which ones must.

A server's block table serves all heads and layers, so a prompt is shortened by pages, once, when it
is computed. The pages of the sinks and of the prompt's end stay whatever their scores; the best of
the others fill the budget. What is generated afterwards is kept and does not count.

Everything that sizes, frees, reads or forecasts takes these numbers, so that none can differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class PageBudget:
    """What stays of a prompt in pages of `block_tokens`; all is rounded up to whole pages.

    The budget is `budget_tokens`, or else a `share` of the prompt's pages. The last `window_tokens`
    of the prompt rank its pages and stay, as the first `sink_tokens` do.
    """

    sink_tokens: int
    window_tokens: int
    block_tokens: int
    budget_tokens: int | None = None
    share: float | None = None

    def pages(self, prompt_tokens: int) -> int:
        """How many pages the prompt fills, the last perhaps in part."""
        return -(-prompt_tokens // self.block_tokens)

    def sink_pages(self, prompt_tokens: int) -> int:
        """How many first pages stay."""
        return min(-(-self.sink_tokens // self.block_tokens), self.pages(prompt_tokens))

    def first_window_page(self, prompt_tokens: int) -> int:
        """From which page on all stay."""
        return max(prompt_tokens - self.window_tokens, 0) // self.block_tokens

    def kept(self, prompt_tokens: int) -> int:
        """How many pages stay; more than the budget where those that must stay are more."""
        pages = self.pages(prompt_tokens)
        if self.budget_tokens is not None:
            wanted = -(-self.budget_tokens // self.block_tokens)
        else:
            assert self.share is not None
            # 0.07 * 100 is a little more than 7 in floating point.
            wanted = ceil(pages * self.share - 1e-9)
        first, end = self.sink_pages(prompt_tokens), self.first_window_page(prompt_tokens)
        return min(max(wanted, pages - max(end - first, 0)), pages)

    def evicts(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length loses pages."""
        return self.kept(prompt_tokens) < self.pages(prompt_tokens)

    def reusable_tokens(self, tokens: int) -> int:
        """How many first tokens of so many may come from a cache; the last one never does.

        Queries are not cached, and those of the window are needed to rank pages.
        """
        if not self.evicts(tokens):
            return tokens - 1
        return max(tokens - self.window_tokens, 0)
