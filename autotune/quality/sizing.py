"""What has to be asked so that the limits can be proved: which suites, and how many items.

A size has a fixed number of items in each category. Where so few would hardly prove that the limits
hold of a candidate that is no worse, a suite is asked more: enough for a chance of `POWER` that all
figures which count pass. That depends on how many of its answers change at all, for the better as
often as for the worse. A typical share is assumed of everybody, and more where two passes of the
baseline show that it changes more by itself. Everybody is asked once, so nothing is corrected for
looking twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvtune.autotune.quality.answers import Questions, prompt_texts
from kvtune.errors import BadGoal
from kvtune.profilers.quality import paired
from kvtune.profilers.quality.compare import Asked, AskedSuite
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

ITEM_S = 0.5
"""What an item is thought to take before any was asked: a small model on two CPU cores, or a large
one on an accelerator, answers two a second or more, `CONCURRENCY` at once."""

MOST_PROMPTS = 256
"""So many prompts of the workload are given to suites: as many as any of them would take."""

MOST_PER_CATEGORY = 400
"""No category is asked more; what more would be needed for stays unproved, and is said."""

POWER = 0.8
"""The chance that all figures that count pass, of a candidate that is as right as is assumed."""

TYPICAL_CHANGE: Mapping[Size, float] = {Size.SCREEN: 0.01, Size.STANDARD: 0.01, Size.FULL: 0.05}
"""The mean square of what answers change, over what they could: of right or wrong, the share that
changes. Of 300 greedy answers of SmolLM2-135M (vLLM 0.32 on a CPU, bfloat16) none changed when the
stock server was asked again in other batches: at most a hundredth, then. With fp8 KV it was 0.07
over 190 answers, with no loss that could be told from none: full asks enough for most of that.
"""

SAMPLED_CHANGE: Mapping[str, float] = {"sampled-length": 0.6}
"""The same of metrics of sampled answers, which change by themselves."""

BROKEN_CHANGE = 0.005
"""The same of broken outputs: there one of 100 answers with fp8 KV, and none of 300 without."""

_BROKEN = Limit(ANY, BROKEN_OUTPUT, BROKEN_OUTPUT.limit)

TOO_FEW = 1.1
"""A tenth less than what is wanted costs so little of the chance that nobody has to be told."""

PRIOR_ITEMS = 50
"""So many items that change as is typical are added to those of two passes, so that one of a few
that changed by chance does not multiply what is asked."""

OWN_DATA = "yours"
"""The suite that has nothing to ask without a file of the user's."""


def asked_suites() -> tuple[Suite, ...]:
    """All suites but the one that needs data."""
    return tuple(suite for name, suite in suites().items() if name != OWN_DATA)


def own_suites(data: str | None) -> tuple[Suite, ...]:
    """The suite that needs data, where there are any."""
    return () if data is None else (suites()[OWN_DATA],)


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
    noise: Mapping[str, float] | None = None,
) -> Questions:
    """The questions that can prove limits, or else what suites themselves allow.

    Only suites that count are asked. Every category has as many items as its limits need, and so
    have the items of a suite together, and those of all suites where texts can break; a number in
    the plan is no bound. `noise` is what `noise_of` says of the baseline.
    """
    counting = [suite for suite in suites if suite_counts(suite.name, limits)]
    held = limits or own_limits(counting)
    items = {suite.name: suite.items(plan) for suite in counting}
    sizes = {name: Counter(item.category for item in own) for name, own in items.items()}
    power = POWER ** (1 / _figures(held, sizes))
    numbers: dict[str, int] = {}
    texts: dict[str, Counter[str]] = {}
    doubts: list[str] = []
    for suite in counting:
        name, size = suite.name, sizes[suite.name]
        usual = max(TYPICAL_CHANGE[plan.size], (noise or {}).get(name, 0.0))
        about = [limit for limit in held if limit.suite == name and size]
        changes = {one: max(usual, SAMPLED_CHANGE.get(one.metric.name, 0.0)) for one in about}
        wanted = {
            limit: _of_each_category(limit, len(size), change, power)
            for limit, change in changes.items()
        }
        most = min(MOST_PER_CATEGORY, max(wanted.values(), default=0))
        if size and most > min(size.values()):
            numbers[name] = most
            items[name] = suite.items(replace(plan, per_category=most))
        asked = Counter(item.category for item in items[name])
        for limit, needed in wanted.items():
            own = [n for of, n in asked.items() if limit.category is None or limit.is_of(of)]
            if needed > TOO_FEW * (fewest := min(own, default=0)):
                doubts.append(_doubt(limit, needed, fewest, changes[limit], "of each category "))
        texts[name] = Counter(item.category for item in items[name] if item.scored is None)
    broken = next((one for one in held if one.suite == ANY), _BROKEN)
    needed = items_for(broken, BROKEN_CHANGE, power) or paired.MOST_ITEMS
    if more := _more_texts(texts, needed):
        numbers |= more
        fewest = sum(
            item.scored is None
            for suite in counting
            for item in suite.items(
                replace(plan, per_category=numbers.get(suite.name, plan.per_category))
            )
        )
        if needed > TOO_FEW * fewest:
            doubts.append(_doubt(broken, needed, fewest, BROKEN_CHANGE))
    return Questions(tuple(counting), plan, tuple(limits), numbers, tuple(doubts))


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


def items_for(limit: Limit, change: float, power: float = 0.5) -> int | None:
    """How many items support a limit with a chance of `power` if nothing got worse.

    `change` as in `TYPICAL_CHANGE`. `None` for levels, of which nothing but the answers can tell,
    and for limits that no number supports.
    """
    metric = limit.metric
    if metric.kind != "difference":
        return None
    margin = limit.value / metric.scale
    if metric.bounds is None:
        return paired.mean_items_needed(change, margin, spread=1.0, power=power)
    # Whether a score knows more than right and wrong shows only in the answers.
    whole = paired.items_needed(margin, change, power=power)
    graded = paired.bounded_items_needed(change, margin, power=power)
    return None if whole is None or graded is None else max(whole, graded)


def noise_of(suites: Sequence[Suite], theirs: Asked, again: Asked) -> dict[str, float]:
    """What answers change between two passes of the baseline, as in `TYPICAL_CHANGE`, by suite.

    Of a suite's first metric, over all its categories: a category of a screen has too few items.
    """
    found = {}
    others = {asked.name: asked for asked in again.suites}
    firsts = {asked.name: asked for asked in theirs.suites}
    for suite in suites:
        if suite.name not in firsts or suite.name not in others:
            continue
        squares = list(_squares(suite, firsts[suite.name], others[suite.name]))
        typical = PRIOR_ITEMS * TYPICAL_CHANGE[Size.STANDARD]
        found[suite.name] = (sum(squares) + typical) / (len(squares) + PRIOR_ITEMS)
    return found


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
        1 if limit.pooled or limit.category is not None else len(sizes.get(limit.suite, ()))
        for limit in limits
        if limit.suite != ANY
    )


def _of_each_category(limit: Limit, categories: int, change: float, power: float) -> int:
    """How many items of each category a limit needs; 0 where it does not say."""
    if limit.metric.kind != "difference":
        return 0
    needed = items_for(limit, change, power) or paired.MOST_ITEMS
    return math.ceil(needed / categories) if limit.pooled else needed


def _doubt(limit: Limit, needed: int, fewest: int, change: float, of_what: str = "") -> str:
    metric, margin = limit.metric, limit.value / limit.metric.scale
    least = (
        paired.items_needed(margin)
        if metric.bounds is not None
        else paired.mean_items_needed(0.0, margin, spread=1.0)
    )
    is_hopeless = not limit.pooled and (least is None or fewest < least)
    then = "cannot be proved unless answers get better" if is_hopeless else "may stay unproved"
    return (
        f"{limit_text(limit)!r} would take {needed} items {of_what}to be proved with some "
        f"certainty where {100 * change:.2g}% of the answers change, and {fewest} are asked: it "
        f"{then}"
    )


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


def _squares(suite: Suite, one: AskedSuite, other: AskedSuite) -> Iterator[float]:
    metric = suite.metrics[0]
    if metric.kind != "difference":
        return
    for item, first, second in zip(one.items, one.answers, other.answers, strict=True):
        if first.error is None and second.error is None:
            pair = suite.figures(item, second, first).get(metric.name)
            if pair is not None:
                yield ((pair[0] - pair[1]) / metric.scale) ** 2
