"""Ask suites' items of something, keep what came back, and compare two such sets of answers.

`ask_suites` is the only part that waits for anybody. What it returns can be stored as JSON, so a
baseline is asked once and compared with many candidates; `compare` is pure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtune.errors import BadInput
from kvtune.profilers.quality import gate, paired
from kvtune.profilers.quality.canary import broken_output
from kvtune.profilers.quality.figures import Row
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, Limit
from kvtune.profilers.quality.samples import NegativeSamples
from kvtune.profilers.quality.suite import Answer, Asker, Item, Suite, SuitePlan
from kvtune.profilers.quality.suite import suites as all_suites
from kvtune.types import QualityPoint, QualityReport, Stored

BATCH_ITEMS = 256
"""Asked at once: enough to keep a server busy, few enough to tell how far it has come."""

MOST_FAILED = 0.1
"""Share of a suite's items that may fail before its figures say nothing."""

SPARE = 1.3
"""More items than an unchanged sample would need, because a few items always change."""

MOST_PER_CATEGORY = 400


class AskedSuite(Stored):
    """A suite's items and what came back for each, in the same order."""

    name: str
    items: tuple[Item, ...]
    answers: tuple[Answer, ...]


class Asked(Stored):
    """All that one asker was asked, and its answers. `by` says what answered."""

    suites: tuple[AskedSuite, ...]
    plan: SuitePlan
    seed: int
    concurrency: int
    wall_s: float
    by: str = ""

    @property
    def errors(self) -> int:
        """How many items have no answer."""
        return sum(answer.error is not None for suite in self.suites for answer in suite.answers)


def plan_for(
    limits: Sequence[Limit], plan: SuitePlan, *, most_per_category: int = MOST_PER_CATEGORY
) -> SuitePlan:
    """The plan with as many items a category as the tightest limit on a change needs.

    Limits on all categories together, on levels and on unbounded metrics leave the number to the
    size, and a number that the plan already names stays.
    """
    needed = [
        paired.items_needed(limit.value / (limit.metric.bounds[1] - limit.metric.bounds[0]))
        for limit in limits
        if limit.metric.kind == "difference" and limit.metric.bounds and not limit.pooled
        if limit.suite != ANY
    ]
    if plan.per_category is not None or not needed:
        return plan
    counts = [most_per_category if count is None else math.ceil(SPARE * count) for count in needed]
    return replace(plan, per_category=min(most_per_category, max(counts)))


async def ask_suites(
    suites: Sequence[Suite],
    plan: SuitePlan,
    asker: Asker,
    *,
    seed: int = 0,
    concurrency: int = 8,
    by: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> Asked:
    """Ask every item of the suites; `on_progress` gets how many of how many were answered.

    Raises:
        BadInput: a suite cannot make items of the plan.
    """
    questions = [(suite.name, suite.items(plan)) for suite in suites]
    items = [item for _, own in questions for item in own]
    started = time.perf_counter()
    answers: list[Answer] = []
    for start in range(0, len(items), BATCH_ITEMS):
        batch = items[start : start + BATCH_ITEMS]
        answers += await asker.ask(batch, seed=seed, concurrency=concurrency)
        if on_progress is not None:
            on_progress(len(answers), len(items))
    wall_s = time.perf_counter() - started
    remaining = iter(answers)
    asked = []
    for suite, (name, own) in zip(suites, questions, strict=True):
        settled = await suite.settle(own, [next(remaining) for _ in own])
        asked.append(AskedSuite(name=name, items=own, answers=tuple(settled)))
    return Asked(
        suites=tuple(asked),
        plan=plan,
        seed=seed,
        concurrency=concurrency,
        wall_s=wall_s,
        by=by,
    )


def compare(
    ours: Asked,
    theirs: Asked,
    again: Asked | None = None,
    limits: Sequence[Limit] = (),
    *,
    suites: Mapping[str, Suite] | None = None,
) -> QualityReport:
    """What the candidate's answers (`ours`) are worth beside the baseline's (`theirs`).

    `again` is the baseline's second run, for the noise floor. Items that one of the two did not
    answer are left out; a suite that lost more than `MOST_FAILED` of them is unclear.

    Raises:
        BadInput: the answers are to different items, or of a suite that is not known.
    """
    known = all_suites() if suites is None else suites
    rows: list[Row] = []
    points: list[QualityPoint] = []
    spoiled: dict[str, str] = {}
    skipped: dict[str, str] = {}
    samples = NegativeSamples()
    for mine in ours.suites:
        suite, base = _known(mine.name, known), _same_items(mine, theirs)
        repeat = None if again is None else _same_items(mine, again)
        failed = [
            error
            for pair in zip(mine.answers, base.answers, strict=True)
            if (error := pair[0].error or pair[1].error) is not None
        ]
        if len(failed) > MOST_FAILED * len(mine.items):
            reason = f"{len(failed)} of {len(mine.items)} items failed: {failed[0]}"
            whole = len(failed) == len(mine.items)
            (skipped if whole else spoiled)[mine.name] = reason
        for index, (item, own, other) in enumerate(
            zip(mine.items, mine.answers, base.answers, strict=True)
        ):
            if own.error is not None or other.error is not None:
                continue
            second = None if repeat is None else repeat.answers[index]
            found = list(_rows(suite, item, own, other, second))
            samples.add(suite, item, found, own, other)
            points += [_point(item, row) for row in found if row.headline and row.suite != ANY]
            rows += found
        if not mine.items:
            skipped[mine.name] = "it has no items for this plan"
    return gate.report(
        rows,
        limits,
        spoiled=spoiled,
        skipped=skipped,
        samples=samples.told(),
        points=points,
        warnings=samples.untold(),
    ).model_copy(
        update={
            "baseline": theirs.by,
            "candidate": ours.by,
            "size": ours.plan.size.value,
            "seed": ours.plan.seed,
            "wall_s": ours.wall_s,
        }
    )


def _known(name: str, suites: Mapping[str, Suite]) -> Suite:
    if name not in suites:
        raise BadInput(
            f"answers of an unknown suite {name!r}", f"known are {', '.join(sorted(suites))}"
        )
    return suites[name]


def _same_items(asked: AskedSuite, other: Asked) -> AskedSuite:
    found = next((suite for suite in other.suites if suite.name == asked.name), None)
    # Stored items have lists where new ones may have tuples, so they are compared as JSON.
    if found is None or _as_json(found) != _as_json(asked):
        raise BadInput(
            f"the two were not asked the same items of suite {asked.name!r}",
            "ask the baseline again, with the same size, seed and data as the candidate",
        )
    return found


def _as_json(asked: AskedSuite) -> object:
    return asked.model_dump(mode="json", include={"items"})


def _rows(
    suite: Suite, item: Item, ours: Answer, theirs: Answer, again: Answer | None
) -> Iterator[Row]:
    """An item's value of each metric of its suite, and whether its answers are broken."""
    usable = again if again is not None and again.error is None else None
    floor = {} if usable is None else suite.figures(item, usable, theirs)
    for name, (mine, base) in suite.figures(item, ours, theirs).items():
        metric = next(metric for metric in suite.metrics if metric.name == name)
        yield Row(
            suite=suite.name,
            category=item.category,
            item=item.key,
            metric=metric,
            headline=metric is suite.metrics[0],
            ours=mine,
            theirs=base,
            again=floor.get(name),
        )
    if ours.texts and theirs.texts:
        base_broken = _broken(theirs)
        yield Row(
            suite=ANY,
            category="",
            item=item.key,
            metric=BROKEN_OUTPUT,
            headline=True,
            ours=_broken(ours),
            theirs=base_broken,
            again=None if usable is None else (_broken(usable), base_broken),
        )


def _broken(answer: Answer) -> float:
    return float(any(broken_output(text) is not None for text in answer.texts))


def _point(item: Item, row: Row) -> QualityPoint:
    return QualityPoint(
        suite=row.suite,
        category=row.category,
        item=row.item,
        place=dict(item.place),
        candidate=row.ours,
        baseline=row.theirs,
    )
