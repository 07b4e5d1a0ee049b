"""What has to be asked so that the limits can be proved: which suites, and how many items.

A size has a fixed number of items in each category. Where so few would hardly prove that the limits
hold of a candidate that is no worse, a suite is asked more: enough for a chance of `POWER` that all
figures which count pass. That depends on how many of its answers change at all, for the better as
often as for the worse. A typical share is assumed of everybody, and more where a screen has shown
more; of levels (a divergence), what the screen showed. Everybody is asked once, so nothing is
corrected for looking twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtune.autotune.quality.answers import Questions, prompt_texts
from kvtune.autotune.quality.seen import TYPICAL_CHANGE, Seen
from kvtune.autotune.quality.wants import TooFew, Want, difference_want, figures_of, level_want
from kvtune.errors import BadGoal
from kvtune.profilers.quality.limits import (
    ANY,
    BROKEN_OUTPUT,
    Limit,
    limit_text,
    own_limits,
    parse_limits,
    suite_counts,
)
from kvtune.profilers.quality.suite import Item, Size, Suite, SuitePlan, suites
from kvtune.types import Workload

MOST_PROMPTS = 256
"""So many prompts of the workload are given to suites: as many as any of them would take."""

MOST_PER_CATEGORY = 400
"""No category is asked more; what more would be needed for stays unproved, and is said."""

POWER = 0.8
"""The chance that all figures that count pass, of a candidate that is as right as is assumed."""

_BROKEN = Limit(ANY, BROKEN_OUTPUT, BROKEN_OUTPUT.limit)

TOO_FEW = 1.1
"""A tenth less than what is wanted costs so little of the chance that nobody has to be told."""

OWN_DATA = "yours"
"""The suite that has nothing to ask without a file of the user's."""


def asked_suites() -> tuple[Suite, ...]:
    """All suites but the one that needs data."""
    return tuple(suite for name, suite in suites().items() if name != OWN_DATA)


def own_suites(data: str | None) -> tuple[Suite, ...]:
    """The suite that needs data, where there are any."""
    return () if data is None else (suites()[OWN_DATA],)


def scores_limit(suites: Sequence[Suite], limits: Sequence[Limit]) -> str:
    """A limit on scores of given texts, in words; empty without any."""
    on_scores = {suite.name for suite in suites if suite.scores}
    return next((limit_text(one) for one in limits if one.suite in on_scores), "")


def read_limits(
    texts: Sequence[str],
    size: Size,
    workload: Workload,
    max_tokens: int | None = None,
    data: str | None = None,
) -> tuple[Limit, ...]:
    """Read limits that a search can hold answers against; `max_tokens` is the context, if known.

    `data` is a file of the user's own questions.

    Raises:
        BadGoal: a text is no limit, or it is about something that is not asked.
        BadInput: a line of the file cannot be used.
        NotFound: there is no such file.
    """
    asked = (*asked_suites(), *own_suites(data))
    limits = parse_limits(texts, {suite.name: suite for suite in asked})
    prompts = prompt_texts(workload.requests)[:MOST_PROMPTS]
    plan = SuitePlan(size=size, max_tokens=max_tokens, workload=prompts, data=data)
    for suite in own_suites(data):
        suite.items(plan)  # What cannot be used is said before anything is measured.
    check_limits(asked, plan, limits)
    return limits


def proving(
    suites: Sequence[Suite],
    plan: SuitePlan,
    limits: Sequence[Limit],
    seen: Seen | None = None,
) -> Questions:
    """The questions that can prove limits, or else what suites themselves allow.

    Only suites that count are asked. Every category has as many items as its limits need, and so
    have the items of a suite together, and those of all suites where texts can break; a number in
    the plan is no bound. `seen` is what a screen showed of the candidate; without one it is thought
    to be as is typical, and levels are asked as much as the plan says.
    """
    seen = seen or Seen()
    counting = [suite for suite in suites if suite_counts(suite.name, limits)]
    held = limits or own_limits(counting)
    items = {suite.name: suite.items(plan) for suite in counting}
    sizes = {name: Counter(item.category for item in own) for name, own in items.items()}
    power = POWER ** (1 / _figures(held, sizes))
    numbers: dict[str, int] = {}
    texts: dict[str, Counter[str]] = {}
    too_few: list[TooFew] = []
    for suite in counting:
        name, size = suite.name, sizes[suite.name]
        usual = max(TYPICAL_CHANGE[plan.size], seen.changes.get(name, 0.0))
        wants = [
            level_want(limit, seen, size, power)
            if limit.metric.kind == "level"
            else difference_want(limit, usual, size, power)
            for limit in held
            if limit.suite == name and size
        ]
        most = min(MOST_PER_CATEGORY, max((want.items for want in wants), default=0))
        if size and most > min(size.values()):
            numbers[name] = _number(suite, plan, wants, most, max(size.values()))
            items[name] = suite.items(replace(plan, per_category=numbers[name]))
        for want in wants:
            if want.items > TOO_FEW * (fewest := _fewest(want.limit, items[name])):
                too_few.append(want.too_few(fewest))
        texts[name] = Counter(item.category for item in items[name] if item.scored is None)
    broken = next((one for one in held if one.suite == ANY), _BROKEN)
    want = replace(difference_want(broken, seen.broken, {"": 1}, power), of_what="")
    if more := _more_texts(texts, want.items):
        numbers |= more
        fewest = sum(
            item.scored is None
            for suite in counting
            for item in suite.items(
                replace(plan, per_category=numbers.get(suite.name, plan.per_category))
            )
        )
        if want.items > TOO_FEW * fewest:
            too_few.append(want.too_few(fewest))
    return Questions(tuple(counting), plan, tuple(limits), numbers, tuple(too_few))


def questions_for(
    suites: Sequence[Suite], plan: SuitePlan, limits: Sequence[Limit], *, keep: bool
) -> Questions:
    """What somebody who chose suites and a size is asked: as much as the size has, or as proves.

    Limits are to be proved beyond a screen, unless the plan names a number. `keep` asks suites too
    that do not count.
    """
    if not limits or plan.size is Size.SCREEN or plan.per_category is not None:
        return Questions(tuple(suites), plan, tuple(limits))
    found = proving(suites, plan, limits)
    return replace(found, suites=tuple(suites)) if keep else found


def check_limits(suites: Sequence[Suite], plan: SuitePlan, limits: Sequence[Limit]) -> None:
    """Refuse a limit that nothing of a plan could be held against.

    Raises:
        BadGoal: no item is of its category at this size, or in this context.
    """
    known = {suite.name: suite for suite in suites}
    for limit in limits:
        if limit.suite in known:
            _check(limit, known[limit.suite], plan)
        elif limit.category is not None:
            raise BadGoal(
                f"{limit_text(limit)!r}: {limit.suite} has no category {limit.category!r}",
                "leave the category out",
            )


def _check(limit: Limit, suite: Suite, plan: SuitePlan) -> None:
    everything, asked = (
        sorted({item.category for item in suite.items(each)})
        for each in (replace(plan, max_tokens=None), plan)
    )
    if limit.category is not None and not any(map(limit.is_of, everything)):
        raise BadGoal(
            f"{limit_text(limit)!r}: {suite.name} has no category {limit.category!r} at "
            f"{plan.size} size",
            f"choose from {', '.join(everything)}" if everything else "leave the category out",
        )
    if asked and (limit.category is None or any(map(limit.is_of, asked))):
        return
    fix = f"choose from {', '.join(asked)}, or raise" if asked else "leave it out, or raise"
    raise BadGoal(
        f"{limit_text(limit)!r}: no item of it fits a context of {plan.max_tokens} tokens",
        f"{fix} --max-model-len",
    )


def _figures(limits: Sequence[Limit], sizes: Mapping[str, Mapping[str, int]]) -> int:
    """How many figures count: those that limits are about, and broken outputs."""
    return 1 + sum(
        figures_of(limit, sizes.get(limit.suite, {})) for limit in limits if limit.suite != ANY
    )


def _number(suite: Suite, plan: SuitePlan, wants: Sequence[Want], most: int, least: int) -> int:
    """How many items of each category hold what limits need, and no fewer than the size has.

    So whoever is asked a number is asked whatever others are that are asked the size's own.
    """
    number = max(most, least)
    items = suite.items(replace(plan, per_category=number))
    short = max(want.items / max(1, _fewest(want.limit, items)) for want in wants)
    if short <= 1:
        return number
    # Where only some texts are long enough for a category, more texts have as many of it.
    more = min(MOST_PER_CATEGORY, math.ceil(number * short))
    items = suite.items(replace(plan, per_category=more))
    enough = all(want.items <= TOO_FEW * _fewest(want.limit, items) for want in wants)
    return more if enough else number


def _fewest(limit: Limit, items: Sequence[Item]) -> int:
    """How many items the smallest category has that a limit is about."""
    asked = Counter(item.category for item in items)
    own = [n for of, n in asked.items() if limit.category is None or limit.is_of(of)]
    return min(own, default=0)


def _more_texts(texts: Mapping[str, Counter[str]], needed: int) -> dict[str, int]:
    """Items of each category where those of all suites are too few to see broken outputs."""
    total = sum(own.total() for own in texts.values())
    if total >= needed:
        return {}
    return {
        name: min(MOST_PER_CATEGORY, math.ceil(max(own.values()) * needed / total))
        for name, own in texts.items()
        if own
    }
