"""What has to be asked so that the limits can be proved: which suites, and how many items.

A size has a fixed number of items in each category. Where equal answers to so few would not prove
that the limits hold, a suite is asked more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtune.autotune.quality.answers import Questions, prompt_texts
from kvtune.errors import BadGoal
from kvtune.profilers.quality.compare import MOST_PER_CATEGORY, items_for, plan_for
from kvtune.profilers.quality.limits import (
    ANY,
    BROKEN_OUTPUT,
    Limit,
    limit_text,
    own_limits,
    parse_limits,
    suite_counts,
)
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan, suites
from kvtune.types import Workload

MOST_PROMPTS = 256
"""So many prompts of the workload are given to suites: as many as any of them would take."""

OWN_DATA = "yours"
"""The suite that has nothing to ask without a file of the user's."""


def asked_suites() -> tuple[Suite, ...]:
    """All suites but the one that needs data."""
    return tuple(suite for name, suite in suites().items() if name != OWN_DATA)


def read_limits(
    texts: Sequence[str], size: Size, workload: Workload, max_tokens: int | None = None
) -> tuple[Limit, ...]:
    """Read limits that a search can hold answers against; `max_tokens` is the context, if known.

    Raises:
        BadGoal: a text is no limit, or it is about something that is not asked.
    """
    asked = asked_suites()
    limits = parse_limits(texts, {suite.name: suite for suite in asked})
    prompts = prompt_texts(workload.requests)[:MOST_PROMPTS]
    check_limits(asked, SuitePlan(size=size, max_tokens=max_tokens, workload=prompts), limits)
    return limits


def proving(suites: Sequence[Suite], plan: SuitePlan, limits: Sequence[Limit]) -> Questions:
    """The questions that can prove limits, or else what suites themselves allow.

    Only suites that count are asked. Every category has as many items as its limits need, and so
    have the items of a suite together, and those of all suites where texts can break.
    """
    counting = [suite for suite in suites if suite_counts(suite.name, limits)]
    held = limits or own_limits(counting)
    numbers: dict[str, int] = {}
    texts: dict[str, Counter[str]] = {}
    for suite in counting:
        items = suite.items(plan)
        size = Counter(item.category for item in items)
        wanted = _items_of_category([one for one in held if one.suite == suite.name], plan, size)
        if size and wanted > min(size.values()):
            numbers[suite.name] = wanted
        texts[suite.name] = Counter(
            {
                category: numbers.get(suite.name, count)
                for category, count in size.items()
                if any(item.category == category and item.scored is None for item in items)
            }
        )
    numbers |= _more_texts(texts, held)
    return Questions(tuple(counting), plan, tuple(limits), numbers)


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


def _items_of_category(limits: Sequence[Limit], plan: SuitePlan, size: Mapping[str, int]) -> int:
    """How many items of each category a suite's limits need; 0 where they do not say."""
    together = [items_for(limit) or 0 for limit in limits if limit.pooled]
    share = math.ceil(max(together, default=0) / max(1, len(size)))
    return max(min(MOST_PER_CATEGORY, share), plan_for(limits, plan).per_category or 0)


def _more_texts(texts: Mapping[str, Counter[str]], limits: Sequence[Limit]) -> dict[str, int]:
    """Items of each category where those of all suites are too few to see broken outputs."""
    limit = next((one for one in limits if one.suite == ANY), None)
    needed = items_for(limit or Limit(ANY, BROKEN_OUTPUT, BROKEN_OUTPUT.limit)) or 0
    total = sum(own.total() for own in texts.values())
    if total >= needed:
        return {}
    return {
        name: min(MOST_PER_CATEGORY, math.ceil(max(own.values()) * needed / total))
        for name, own in texts.items()
        if own
    }
