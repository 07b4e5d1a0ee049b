"""How many pages of a request stay when an engine drops whole pages of it, and which ones must.

A server's block table serves all heads and layers, so a request is shortened by pages. The pages of
the sinks, of marked spans and of the latest tokens stay whatever their scores; the best of the
others fill the budget. Pages leave once a prompt is computed. What is generated afterwards is kept
and does not count, or, `while_decoding`, counts as all else does.

Everything that sizes, frees, reads or forecasts takes these numbers, so that none can differ. Sets
of pages are numbers: bit p is page p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

Span = tuple[int, int]
"""Tokens [start, end) of a request."""


@dataclass(frozen=True, slots=True)
class PageBudget:
    """What stays in pages of `block_tokens`; all is rounded up to whole pages.

    The budget is `budget_tokens`, or else a `share` of the prompt's pages. The first `sink_tokens`
    and the last `window_tokens` stay. Pages are ranked by the queries of the prompt's last
    `scored_tokens` (None: of all), and by those of what is generated where that counts.
    """

    sink_tokens: int
    window_tokens: int
    block_tokens: int
    budget_tokens: int | None = None
    share: float | None = None
    scored_tokens: int | None = None
    while_decoding: bool = False

    def pages(self, tokens: int) -> int:
        """How many pages so many tokens fill, the last perhaps in part."""
        return -(-tokens // self.block_tokens)

    def pages_of(self, spans: Iterable[Span]) -> int:
        """The pages that hold any token of `spans`."""
        mask = 0
        for start, end in spans:
            mask |= _pages(self.pages(end)) & ~_pages(start // self.block_tokens)
        return mask

    def stays(self, tokens: int, marked: int = 0) -> int:
        """Which pages of a request of so many tokens stay whatever they are worth.

        `marked`: those that the request itself wants to stay, among its pages.
        """
        sinks = _pages(self.pages(min(self.sink_tokens, tokens)))
        window = _pages(self.pages(tokens)) & ~_pages(self.first_window_page(tokens))
        return sinks | window | marked

    def first_window_page(self, tokens: int) -> int:
        """From which page on all stay."""
        return max(tokens - self.window_tokens, 0) // self.block_tokens

    def wanted(self, prompt_tokens: int) -> int:
        """The budget of a request with such a prompt, in pages."""
        if self.budget_tokens is not None:
            return self.pages(self.budget_tokens)
        assert self.share is not None
        # 0.07 * 100 is a little more than 7 in floating point.
        return ceil(self.pages(prompt_tokens) * self.share - 1e-9)

    def excess(self, prompt_tokens: int, tokens: int, gone: int = 0, marked: int = 0) -> int:
        """How many pages more are held than stay, of a request of so many `tokens` by now.

        What must stay does, also beyond the budget. `gone`: pages that it lost already.
        """
        kept = max(self.wanted(prompt_tokens), self.stays(tokens, marked).bit_count())
        return max(self.pages(tokens) - gone.bit_count() - kept, 0)

    def kept(self, prompt_tokens: int, marked: int = 0) -> int:
        """How many pages of a prompt stay when it is computed."""
        return self.pages(prompt_tokens) - self.excess(prompt_tokens, prompt_tokens, 0, marked)

    def evicts(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length loses pages when it is computed."""
        return self.excess(prompt_tokens, prompt_tokens) > 0

    def first_scoring(self, prompt_tokens: int) -> int:
        """The place of the first query of a prompt that ranks pages."""
        if self.scored_tokens is None:
            return 0
        return max(prompt_tokens - self.scored_tokens, 0)

    def reusable_tokens(self, tokens: int) -> int:
        """How many first tokens of so many may come from a cache; the last one never does.

        Queries are not cached, and those that rank pages are needed.
        """
        if not self.while_decoding and not self.evicts(tokens):
            return tokens - 1
        return min(self.first_scoring(tokens), tokens - 1)


def _pages(count: int) -> int:
    """The first so many pages."""
    return (1 << count) - 1
