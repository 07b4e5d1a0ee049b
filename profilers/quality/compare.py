"""Ask suites' items of something, keep what came back, and compare two such sets of answers.

`ask_suites` is the only part that waits for anybody. What it returns can be stored as JSON, so a
baseline is asked once and compared with many candidates; `compare` is pure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pydantic import Field

from kvtune.errors import BadInput
from kvtune.profilers.quality import gate
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

_REFUSAL = re.compile(r"HTTP 4(?:00|04|22)\b|no chat template")
"""How it sounds when chats are not taken at all: by vLLM and by the reference engine where a model
has no chat template, and by servers without that address. Who is busy or gone says something else.
"""


class AskedSuite(Stored):
    """A suite's items and what came back for each, in the same order."""

    name: str
    items: tuple[Item, ...]
    answers: tuple[Answer, ...]

    @property
    def refusal(self) -> str | None:
        """Why chats were refused, where all of them were; `None` else."""
        pairs = zip(self.items, self.answers, strict=True)
        errors = [answer.error or "" for item, answer in pairs if item.messages is not None]
        return errors[0] if errors and all(map(_REFUSAL.search, errors)) else None

    @property
    def errors(self) -> int:
        """How many items have no answer; not those chats that were all refused."""
        refused = self.refusal is not None
        return sum(
            answer.error is not None and not (refused and item.messages is not None)
            for item, answer in zip(self.items, self.answers, strict=True)
        )


class Asked(Stored):
    """All that one asker was asked, and its answers.

    `by` says what answered; `versions` and `warnings` are what is known of that.
    """

    suites: tuple[AskedSuite, ...]
    plan: SuitePlan
    seed: int
    concurrency: int
    wall_s: float
    by: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def errors(self) -> int:
        """How many items have no answer that could be had."""
        return sum(suite.errors for suite in self.suites)


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

    `again` is the baseline's second run, for the noise floor. A suite that lost more than
    `MOST_FAILED` of its items is unclear; where fewer failed, those that only the candidate did not
    answer count as broken outputs, so that what it cannot do is not left out of its account. Chats
    are left out with a warning where the baseline refuses all of a suite's: there is nothing to
    lose.

    Raises:
        BadInput: the answers are to different items, or of a suite that is not known.
    """
    known = all_suites() if suites is None else suites
    found = _Found()
    for mine in ours.suites:
        base = _same_items(mine, theirs)
        repeat = None if again is None else _same_items(mine, again)
        found.add(_known(mine.name, known), mine, base, repeat)
    own = [each.warnings for each in (theirs, again, ours) if each is not None]
    told = dict.fromkeys([*chain.from_iterable(own), *_other_versions(ours, theirs)])
    return gate.report(
        found.rows,
        limits,
        spoiled=found.spoiled,
        skipped=found.skipped,
        samples=found.samples.told(),
        points=found.points,
        warnings=(*found.refused(), *found.samples.untold(), *told),
    ).model_copy(
        update={
            "baseline": theirs.by,
            "candidate": ours.by,
            "size": ours.plan.size.value,
            "seed": ours.plan.seed,
            "wall_s": ours.wall_s,
            "unanswered": sum(each.errors for each in (ours, theirs, again) if each is not None),
            "versions": {**theirs.versions, **ours.versions},
        }
    )


@dataclass(slots=True)
class _Found:
    """What a comparison's items say, suite by suite."""

    rows: list[Row] = field(default_factory=list)
    points: list[QualityPoint] = field(default_factory=list)
    spoiled: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    samples: NegativeSamples = field(default_factory=NegativeSamples)
    _refused: dict[str, list[str]] = field(default_factory=dict)

    def add(
        self, suite: Suite, ours: AskedSuite, theirs: AskedSuite, again: AskedSuite | None
    ) -> None:
        """Compare the answers to a suite's items.

        An item that only the baseline answered is a broken output; those that either did not
        answer are left out of the suite's own figures.
        """
        refusal = theirs.refusal
        asked = [
            (index, item, ours.answers[index], theirs.answers[index])
            for index, item in enumerate(ours.items)
            if refusal is None or item.messages is None
        ]
        if refusal is not None:
            self._note_refused(suite.name, ours.items, refusal)
            if not asked:
                return
        failed = [error for *_, mine, base in asked if (error := mine.error or base.error)]
        is_spoiled = len(failed) > MOST_FAILED * len(asked)
        if not ours.items:
            self.skipped[suite.name] = "it has no items for this plan"
        elif is_spoiled:
            whole = len(failed) == len(asked)
            reason = f"{len(failed)} of {len(asked)} items failed: {failed[0]}"
            (self.skipped if whole else self.spoiled)[suite.name] = reason
        for index, item, mine, base in asked:
            second = None if again is None else again.answers[index]
            usable = second if second is not None and second.error is None else None
            if base.error is not None or (mine.error is not None and is_spoiled):
                continue
            found = [] if mine.error else list(_rows(suite, item, mine, base, usable))
            found += _output_rows(_about(suite.name, item), item, mine, base, usable)
            self.samples.add(suite, item, found, mine, base)
            self.points += [_point(item, row) for row in found if row.headline and row.suite != ANY]
            self.rows += found
        judged = {row.suite for row in self.rows} | self.skipped.keys()
        if suite.name not in judged:
            self.skipped[suite.name] = "none of its answers can be compared"

    def refused(self) -> list[str]:
        """What was left out because the baseline takes no chats."""
        return [
            f"left out, because the baseline refuses chats: {', '.join(names)} ({reason})"
            for reason, names in self._refused.items()
        ]

    def _note_refused(self, suite: str, items: Sequence[Item], reason: str) -> None:
        chats = dict.fromkeys(item.category for item in items if item.messages is not None)
        is_whole = all(item.messages is not None for item in items)
        names = [suite] if is_whole else [f"{suite}/{category}" for category in chats]
        self._refused.setdefault(reason, []).extend(names)


def _other_versions(ours: Asked, theirs: Asked) -> list[str]:
    """What differs between the two beside what is compared."""
    return [
        f"the baseline ran {name} {theirs.versions[name]}, the candidate {ours.versions[name]}: "
        "the change may be the version's"
        for name in theirs.versions.keys() & ours.versions.keys()
        if theirs.versions[name] != ours.versions[name]
    ]


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
    """An item's value of each metric of its suite."""
    floor = {} if again is None else suite.figures(item, again, theirs)
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
            about=_about(suite.name, item),
        )


def _output_rows(
    about: str, item: Item, ours: Answer, theirs: Answer, again: Answer | None
) -> Iterator[Row]:
    """Whether an item's texts are broken; nothing for items that have none."""
    if theirs.texts and (ours.texts or ours.error):
        base_broken = _broken(theirs)
        yield Row(
            suite=ANY,
            category="",
            item=item.key,
            metric=BROKEN_OUTPUT,
            headline=True,
            ours=_broken(ours),
            theirs=base_broken,
            again=None if again is None else (_broken(again), base_broken),
            about=about,
        )


def _about(suite: str, item: Item) -> str:
    return item.about or f"{suite}/{item.key}"


def _broken(answer: Answer) -> float:
    is_broken = answer.error or any(broken_output(text) is not None for text in answer.texts)
    return float(bool(is_broken))


def _point(item: Item, row: Row) -> QualityPoint:
    return QualityPoint(
        suite=row.suite,
        category=row.category,
        item=row.item,
        place=dict(item.place),
        candidate=row.ours,
        baseline=row.theirs,
        again=None if row.again is None else row.again[0],
    )
