"""The engine process's account: which requests are to lose pages, and which pages they lost.

Pure: places and tickets in, orders out. Requests are known from their arrival to their end, through
preemptions, so that what is computed again is computed in the same way: what each token sees stays
as it was, and no query scores twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from kvtune.engines.vllm.plugin.evict.orders import Ask, Choice, Eviction, Orders
from kvtune.policies.page_budget import PageBudget, Span


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step: tokens [start, end), the last of which goes into page `tail`."""

    name: str
    start: int
    end: int
    tail: int


@dataclass(slots=True)
class _Account:
    """`marked`: pages that stay. `scored_tokens`: queries before this place scored, or never do.

    `awaits`: the worker was asked for a choice.
    """

    ticket: int
    prompt_tokens: int
    marked: int
    scored_tokens: int
    awaits: bool = False


class Ledger:
    """`evictions`: those of each request that has some, by its name, in the order they came."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget = budget
        self.evictions: dict[str, tuple[Eviction, ...]] = {}
        self._accounts: dict[str, _Account] = {}
        self._names: dict[int, str] = {}
        self._over: list[int] = []
        self._tickets = count()

    def begin(
        self, name: str, prompt_tokens: int, most_tokens: int, spans: Iterable[Span] = ()
    ) -> None:
        """A request arrived that may become `most_tokens` long, or goes on with more of a prompt.

        The tokens of `spans` stay.
        """
        tokens = most_tokens if self.budget.while_decoding else prompt_tokens
        marked = self.budget.pages_of(spans)
        if name in self._accounts or not self.budget.excess(prompt_tokens, tokens, 0, marked):
            return
        scored = self.budget.first_scoring(prompt_tokens)
        account = _Account(next(self._tickets), prompt_tokens, marked, scored)
        self._accounts[name] = account
        self._names[account.ticket] = name

    def concerns(self, name: str) -> bool:
        """Whether a request may lose pages."""
        return name in self._accounts

    def lost(self, name: str) -> int:
        """The pages that a request lost by now."""
        evictions = self.evictions.get(name)
        return evictions[-1].mask if evictions else 0

    def orders(self, scheduled: Iterable[Scheduled]) -> Orders:
        """What the worker is told of a step."""
        asks: dict[int, Ask] = {}
        evictions: dict[int, tuple[Eviction, ...]] = {}
        for part in scheduled:
            if hidden := _hidden(self.evictions.get(part.name, ()), part):
                evictions[part.tail] = hidden
            if (ask := self._ask(part)) is not None:
                asks[part.tail] = ask
        over, self._over = tuple(self._over), []
        return Orders(asks, evictions, over)

    def _ask(self, part: Scheduled) -> Ask | None:
        account = self._accounts[part.name]
        past = part.end if self.budget.while_decoding else min(part.end, account.prompt_tokens)
        first = max(part.start, account.scored_tokens)
        if first >= past:
            return None
        account.scored_tokens = past
        choice = self._choice(part.name, account, past)
        account.awaits |= choice is not None
        return Ask(account.ticket, first, past, choice)

    def _choice(self, name: str, account: _Account, tokens: int) -> Choice | None:
        if account.awaits or tokens < account.prompt_tokens:
            return None
        gone = self.lost(name)
        excess = self.budget.excess(account.prompt_tokens, tokens, gone, account.marked)
        if not excess:
            return None
        every = (1 << self.budget.pages(tokens)) - 1
        return Choice(every & ~gone & ~self.budget.stays(tokens, account.marked), excess)

    def name_of(self, ticket: int) -> str | None:
        """The request of a ticket, unless it ended."""
        return self._names.get(ticket)

    def decide(self, name: str, mask: int, computed_tokens: int) -> None:
        """The worker chose pages that a request loses.

        Tokens lose sight of them that come after the `computed_tokens`, which count those under
        way.
        """
        account = self._accounts[name]
        account.awaits = False
        first_token = max(account.prompt_tokens, account.scored_tokens, computed_tokens)
        before = self.evictions.get(name, ())
        self.evictions[name] = (*before, Eviction(first_token, self.lost(name) | mask))

    def end(self, name: str) -> None:
        """A request ended, however it did."""
        account = self._accounts.pop(name, None)
        if account is not None:
            del self._names[account.ticket]
            self._over.append(account.ticket)
        self.evictions.pop(name, None)


def _hidden(evictions: Sequence[Eviction], part: Scheduled) -> tuple[Eviction, ...]:
    """Those of `evictions` that tokens of `part` tell apart."""
    hidden = []
    for each in reversed(evictions):
        if each.first_token < part.end:
            hidden.append(each)
        if each.first_token <= part.start:
            break
    return tuple(reversed(hidden))
