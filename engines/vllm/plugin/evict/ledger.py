"""The engine process's account: which requests are to lose pages, and which pages they lost.

Pure: places and tickets in, orders out. Requests are known from their arrival to their end, through
preemptions, so that what is computed again is computed in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from kvtune.engines.vllm.plugin.evict.orders import Ask, Eviction, Orders
from kvtune.policies.page_budget import PageBudget


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step: tokens [start, end), the last of which goes into page `tail`."""

    name: str
    start: int
    end: int
    tail: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    ticket: int
    tokens: int


class Ledger:
    """`evictions`: by the name of each request that has one."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget = budget
        self.evictions: dict[str, Eviction] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._names: dict[int, str] = {}
        self._over: list[int] = []
        self._tickets = count()

    def begin(self, name: str, prompt_tokens: int) -> None:
        """A request arrived, or goes on with more of a prompt, which is kept whole."""
        if name in self._prompts or not self.budget.evicts(prompt_tokens):
            return
        prompt = self._prompts[name] = _Prompt(next(self._tickets), prompt_tokens)
        self._names[prompt.ticket] = name

    def concerns(self, name: str) -> bool:
        """Whether a request loses pages, sooner or later."""
        return name in self._prompts

    def orders(self, scheduled: Iterable[Scheduled]) -> Orders:
        """What the worker is told of a step."""
        asks: dict[int, Ask] = {}
        evictions: dict[int, Eviction] = {}
        for part in scheduled:
            prompt, eviction = self._prompts[part.name], self.evictions.get(part.name)
            window = prompt.tokens - self.budget.window_tokens
            if eviction is not None:
                if part.end > eviction.first_token:
                    evictions[part.tail] = eviction
            elif part.start < prompt.tokens and part.end > window:
                asks[part.tail] = Ask(
                    prompt.ticket,
                    prompt.tokens,
                    begins=part.start <= window,
                    ends=part.end >= prompt.tokens,
                )
        over, self._over = tuple(self._over), []
        return Orders(asks, evictions, over)

    def name_of(self, ticket: int) -> str | None:
        """The request of a ticket, unless it ended."""
        return self._names.get(ticket)

    def decide(self, name: str, mask: int, computed_tokens: int) -> None:
        """The worker chose the pages that a request loses.

        Tokens lose sight of them that come after the `computed_tokens`, which count those under
        way. A request is decided upon once.
        """
        first_token = max(self._prompts[name].tokens, computed_tokens)
        self.evictions.setdefault(name, Eviction(first_token, mask))

    def end(self, name: str) -> None:
        """A request ended, however it did."""
        prompt = self._prompts.pop(name, None)
        if prompt is not None:
            del self._names[prompt.ticket]
            self._over.append(prompt.ticket)
        self.evictions.pop(name, None)
