"""Ask subjects what is not known yet of their answers, and keep the answers in the history.

They are kept suite by suite as they come, under all that they depend on. So an interrupt costs the
suite under way, and a baseline that was asked once is known to every comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

import kvtune
from kvtune.autotune.quality.prices import characters
from kvtune.autotune.quality.subjects import Opened, Subject
from kvtune.autotune.quality.wants import TooFew
from kvtune.autotune.reporting import Reporter
from kvtune.profilers.load import runtime
from kvtune.profilers.quality.compare import Asked, AskedSuite, ask_suites, compare
from kvtune.profilers.quality.limits import Limit
from kvtune.profilers.quality.suite import Item, Size, Suite, SuitePlan
from kvtune.types import QualityReport, Request, fingerprint_of

if TYPE_CHECKING:
    from kvtune.store.database import Store

CONCURRENCY = 32
AGAIN_CONCURRENCY = 12
"""Other batches than the first time, so that what batches change counts as noise."""


@dataclass(frozen=True)
class Questions:
    """What is asked of everybody: the suites, the plan of their items, and the limits.

    `numbers` says of suites how many items of each category they are asked, where that is not what
    the plan says. `too_few` are the limits that these are too few for.
    """

    suites: tuple[Suite, ...]
    plan: SuitePlan
    limits: tuple[Limit, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    too_few: tuple[TooFew, ...] = ()

    @property
    def doubts(self) -> tuple[str, ...]:
        """Which limits the items are too few for, in words."""
        return tuple(map(str, self.too_few))

    @property
    def chance(self) -> float:
        """That of a right candidate to pass the limits which the items are too few for."""
        return math.prod(one.chance for one in self.too_few)

    def plan_of(self, suite: Suite) -> SuitePlan:
        """The plan of a suite's items."""
        number = self.numbers.get(suite.name, self.plan.per_category)
        return replace(self.plan, per_category=number)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How many items of each suite are asked."""
        return {name: items for name, (items, _) in self._sizes.items()}

    @cached_property
    def characters(self) -> Mapping[str, int]:
        """What there is to read and to write of each suite; see `prices.characters`."""
        return {name: long for name, (_, long) in self._sizes.items()}

    @cached_property
    def _sizes(self) -> Mapping[str, tuple[int, int]]:
        every = {suite.name: suite.items(self.plan_of(suite)) for suite in self.suites}
        return {name: (len(own), sum(map(characters, own))) for name, own in every.items()}

    @property
    def count(self) -> int:
        """How many items are asked."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Pass:
    """One time that a subject is asked everything; `restarted`: on its own, after a restart."""

    title: str
    seed: int
    concurrency: int
    restarted: bool = False


Watch = Callable[[Sequence[Mapping[str, Asked]]], None]
"""Gets the answers of each time so far, by suite, before more is asked: it may raise
`EnoughAsked`."""


class EnoughAsked(Exception):
    """No more is asked, although something is missing. What was answered is kept."""


@dataclass(slots=True)
class AnswerBook:
    """The answers of subjects: those that are kept, and those that are asked for now.

    `reuse=False` asks again what is kept already.
    """

    history: Store
    reporter: Reporter
    reuse: bool = True

    def ask(
        self,
        questions: Questions,
        subject: Subject,
        passes: Sequence[Pass],
        watch: Watch = lambda known: None,
    ) -> list[Asked]:
        """What a subject answers each time; it is opened only if something is not kept yet.

        Raises:
            EngineError: it cannot be started, or dies.
            EnoughAsked: `watch` says so.
        """
        known = [self._kept(questions, subject, one) for one in passes]
        watch(known)
        if all(len(found) == len(questions.suites) for found in known):
            self.reporter.note(f"{subject.by}: all answers are known from before")
        else:
            counter = _Counter(self.reporter)
            with subject.open(self.reporter, counter.within_batch) as opened:
                for one, found in zip(passes, known, strict=True):
                    for part in self._missing_parts(questions, found):
                        self._ask(questions, part, subject, opened, one, found, counter)
                        watch(known)
        return [whole(questions, one, found) for one, found in zip(passes, known, strict=True)]

    def missing(
        self, questions: Questions, subject: Subject, passes: Sequence[Pass]
    ) -> tuple[str, ...]:
        """Which suites would be asked now because they are not kept; a name for each time."""
        known = (self._kept(questions, subject, one) for one in passes)
        return missing_names(questions, list(known))

    def _missing_parts(self, questions: Questions, known: Mapping[str, Asked]) -> list[list[Suite]]:
        """What is asked one after the other."""
        missing = [suite for suite in questions.suites if suite.name not in known]
        # The ends of many small suites would leave the server idle; those of large ones do not.
        together = questions.plan.size is Size.SCREEN and not questions.numbers
        return [missing] if together and missing else [[suite] for suite in missing]

    def _ask(
        self,
        questions: Questions,
        part: Sequence[Suite],
        subject: Subject,
        opened: Opened,
        one: Pass,
        known: dict[str, Asked],
        counter: _Counter,
    ) -> None:
        names = ", ".join(suite.name for suite in part)
        self.reporter.note(f"asking {one.title}: {names}")
        counter.begin()
        asked = runtime.run(
            ask_suites(
                part,
                questions.plan_of(part[0]),
                opened.asker,
                seed=one.seed,
                concurrency=one.concurrency,
                by=subject.by,
                on_progress=counter.after_batch,
            )
        )
        opened.check()
        told = {"versions": dict(opened.versions), "warnings": opened.warnings}
        for own in _by_suite(asked.model_copy(update=told)):
            known[own.suites[0].name] = own
            self._keep(questions, subject, one, own)

    def _kept(self, questions: Questions, subject: Subject, one: Pass) -> dict[str, Asked]:
        """Answers from before that are to the very items that would be asked now."""
        found: dict[str, Asked] = {}
        for suite in questions.suites if self.reuse else ():
            key = _key(questions, subject, one, suite)
            text = None if key is None else self.history.quality_answers(key)
            if text is None:
                continue
            try:
                asked = Asked.model_validate_json(text)
            except ValidationError:
                continue  # of an older kvtune
            items = suite.items(questions.plan_of(suite))
            if _as_json(asked.suites[0].items) == _as_json(items):
                found[suite.name] = asked
        return found

    def _keep(self, questions: Questions, subject: Subject, one: Pass, asked: Asked) -> None:
        name = asked.suites[0].name
        suite = next(suite for suite in questions.suites if suite.name == name)
        key = _key(questions, subject, one, suite)
        if key is not None and not asked.errors:
            self.history.save_quality_answers(key, asked.model_dump_json())


def report_on(
    questions: Questions,
    model: str,
    ours: Asked,
    theirs: Asked,
    again: Asked | None,
    *,
    unscored: str = "",
) -> QualityReport:
    """What a candidate's answers are worth beside the baseline's two times, or its first alone.

    `unscored` says why scores of given texts tell nothing of it, if so: suites of these are left
    out, and a limit on one is not proved.
    """
    hidden = [suite.name for suite in questions.suites if suite.scores] if unscored else []
    known = {suite.name: suite for suite in questions.suites if suite.name not in hidden}
    if hidden:
        judged = replace(questions, suites=tuple(known.values()))
        ours, theirs = answers_to(judged, ours), answers_to(judged, theirs)
        again = None if again is None else answers_to(judged, again)
    found = compare(ours, theirs, again, questions.limits, suites=known)
    doubts = questions.doubts if found.outcome == "unclear" else ()
    return found.model_copy(
        update={
            "model": model,
            "warnings": (*found.warnings, *doubts, *unasked(questions)),
            "skipped": {**found.skipped, **dict.fromkeys(hidden, unscored)},
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


def missing_names(questions: Questions, known: Sequence[Mapping[str, Asked]]) -> tuple[str, ...]:
    """The suites that no answers are known of, a name for each time."""
    return tuple(
        suite.name for found in known for suite in questions.suites if suite.name not in found
    )


def answers_to(questions: Questions, asked: Asked) -> Asked:
    """The answers to these questions alone, of somebody who was asked as many or more.

    Raises:
        KeyError: something of these was not asked.
    """
    known = {suite.name: suite for suite in asked.suites}
    suites = []
    for suite in questions.suites:
        own = known[suite.name]
        items = suite.items(questions.plan_of(suite))
        if len(items) == len(own.items):
            suites.append(own)
            continue
        pairs = zip(own.items, own.answers, strict=True)
        by_key = {(item.category, item.key): (item, answer) for item, answer in pairs}
        chosen = [by_key[item.category, item.key] for item in items]
        suites.append(
            AskedSuite(
                name=suite.name,
                items=tuple(item for item, _ in chosen),
                answers=tuple(answer for _, answer in chosen),
            )
        )
    return asked.model_copy(update={"suites": tuple(suites), "plan": questions.plan})


def fitting(plan: SuitePlan, *subjects: Subject) -> SuitePlan:
    """The plan with the smallest context, so that everybody can be asked the same."""
    contexts = (plan.max_tokens, *(subject.max_tokens for subject in subjects))
    known = [tokens for tokens in contexts if tokens is not None]
    return replace(plan, max_tokens=min(known)) if known else plan


def unasked(questions: Questions) -> list[str]:
    """Which categories a plan asks nothing of, because the context is too small for them.

    Raises:
        BadInput: a suite cannot make items of the plan.
    """
    plan = questions.plan
    left_out = []
    for suite in questions.suites:
        asked, known = (
            dict.fromkeys(item.category for item in suite.items(each))
            for own in (questions.plan_of(suite),)
            for each in (own, replace(own, max_tokens=None))
        )
        left_out += [f"{suite.name}/{category}" for category in known if category not in asked]
    if not left_out:
        return []
    return [f"not asked, too long for {plan.max_tokens} tokens: {', '.join(left_out)}"]


def prompt_texts(requests: Sequence[Request]) -> tuple[str, ...]:
    """The different texts of requests' prompts; those that are lengths or token ids have none."""
    texts = (
        request.prompt
        if request.messages is None
        else "\n".join(str(message.get("content") or "") for message in request.messages)
        for request in requests
    )
    return tuple(dict.fromkeys(text for text in texts if text))


def _key(questions: Questions, subject: Subject, one: Pass, suite: Suite) -> str | None:
    if subject.key is None:
        return None
    plan = questions.plan_of(suite)
    asked = {**asdict(plan), "workload": fingerprint_of(list(plan.workload))}
    return fingerprint_of(
        [
            dict(subject.key),
            kvtune.__version__,
            asked,
            suite.name,
            one.seed,
            one.concurrency,
            one.restarted,
        ]
    )


def whole(questions: Questions, one: Pass, parts: Mapping[str, Asked]) -> Asked:
    """The answers to suites, in the order of the questions."""
    ordered = [parts[suite.name] for suite in questions.suites]
    return Asked(
        suites=tuple(part.suites[0] for part in ordered),
        plan=questions.plan,
        seed=one.seed,
        concurrency=one.concurrency,
        wall_s=sum(part.wall_s for part in ordered),
        by=ordered[0].by if ordered else "",
        versions={name: told for part in ordered for name, told in part.versions.items()},
        warnings=tuple(dict.fromkeys(each for part in ordered for each in part.warnings)),
    )


def _by_suite(asked: Asked) -> list[Asked]:
    """The answers of each suite alone, with its items' share of the time."""
    items = sum(len(suite.items) for suite in asked.suites) or 1
    return [
        asked.model_copy(
            update={"suites": (suite,), "wall_s": asked.wall_s * len(suite.items) / items}
        )
        for suite in asked.suites
    ]


def _as_json(items: Sequence[Item]) -> object:
    """Items as they read after being stored, where lists stand for tuples."""
    return TypeAdapter(tuple[Item, ...]).dump_python(tuple(items), mode="json")


class _Counter:
    """Adds the items of earlier batches to what an asker says of the one under way."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._before = 0

    def begin(self) -> None:
        """Count from nothing."""
        self._before = 0

    def within_batch(self, done: int, total: int) -> None:
        """An asker has answered one more item."""
        self._reporter.asked(self._before + done, self._before + total)

    def after_batch(self, done: int, total: int) -> None:
        """A batch is complete."""
        self._before = done
        self._reporter.asked(done, total)
