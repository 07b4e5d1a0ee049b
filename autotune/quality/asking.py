"""What the trials of a study are asked, how often, what it takes, and what is known of it.

A candidate is asked a screen, and as a finalist what proves its limits by what its screen showed.
The stock defaults are asked whatever any finalist is. Between the suites of a finalist it is seen
whether the rest is still of use, and whether there is time for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality import words
from kvtune.autotune.quality.answers import (
    AGAIN_CONCURRENCY,
    CONCURRENCY,
    AnswerBook,
    EnoughAsked,
    Pass,
    Questions,
    Watch,
    missing_names,
    prompt_texts,
)
from kvtune.autotune.quality.prices import Prices
from kvtune.autotune.quality.proof import NO_MORE, lost_for_sure, out_of_time
from kvtune.autotune.quality.seen import Seen, seen_in
from kvtune.autotune.quality.sizing import MOST_PROMPTS, check_limits, proving
from kvtune.autotune.quality.subjects import ServedSubject, Subject
from kvtune.autotune.trial import Bench
from kvtune.engines.base import ServerSpec
from kvtune.errors import BadGoal
from kvtune.policies.plugin_arguments import asked_by
from kvtune.policies.unscored import why_unscored
from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import EffectiveConfig, QualityReport, Trial, Workload

STOCK = 0
"""The number of the trial with the stock defaults."""

LeftS = Callable[[], float]
"""The seconds that are left for questions."""


def unlimited_s() -> float:
    """No end of time."""
    return math.inf


@dataclass(slots=True)
class Known:
    """What is known of a trial's answers at one size.

    `answers` has one for each time that it was asked; `unasked` says why there are no more.
    `missing` names the suites that would be asked now, for each time. `looked_at` are those of
    which it was seen whether they are lost.
    """

    answers: list[Asked] = field(default_factory=list)
    report: QualityReport | None = None
    unasked: str | None = None
    questions: Questions | None = None
    missing: tuple[str, ...] | None = None
    looked_at: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether nobody knows yet what comes of it."""
        return self.report is None and self.unasked is None


@dataclass(slots=True)
class Asking:
    """The questions of one study. `effective` is what the stock server said of itself, if it did.

    `reuse=False` takes no answers from before.
    """

    suites: tuple[Suite, ...]
    rules: QualityRules
    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    seed: int
    reuse: bool
    effective: EffectiveConfig | None = None
    prices: Prices = field(init=False, default_factory=Prices)
    finalists: list[Trial] = field(init=False, default_factory=list)
    _known: dict[tuple[int, Size], Known] = field(init=False, default_factory=dict)
    _typical: dict[Size, Questions] = field(init=False, default_factory=dict)
    _stock_missing: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = field(
        init=False, default_factory=dict
    )
    _is_checked: bool = field(init=False, default=False)
    _refusal: str | None = field(init=False, default=None)

    # --- what is known ---

    def of(self, number: int, size: Size) -> Known:
        """What is known of a trial at one size."""
        return self._known.setdefault((number, size), Known())

    def seen(self, number: int) -> Seen:
        """What the screen of a trial showed; what is typical where it had none."""
        report = self.of(number, Size.SCREEN).report
        return Seen() if report is None else seen_in(self.suites, report)

    def screened(self) -> list[int]:
        """The trials of which a screen showed something."""
        return [
            number
            for (number, size), known in self._known.items()
            if size is Size.SCREEN and known.report is not None
        ]

    def refusal(self) -> str | None:
        """Why nothing that may change answers can be vouched for, whatever it answers."""
        if not self._is_checked:
            self._is_checked = True
            try:
                check_limits(self.suites, self.plan(self.rules.size), self.rules.limits)
            except BadGoal as error:
                self._refusal = f"quality cannot be judged here: {error.message}"
        return self._refusal

    def unscored(self, arguments: Mapping[str, JsonValue]) -> str:
        """Why scores of given texts tell nothing of a trial with these; empty if they do."""
        return why_unscored(asked_by(arguments), asked_by(self.study.base_arguments))

    def is_settled(self, number: int, size: Size) -> bool:
        """Whether asking a trial would tell nothing more, or could not be compared."""
        known = self.of(number, size)
        if not known.is_open or self.is_answered(number, size):
            return True
        if self.of(STOCK, size).unasked is not None or self.refusal() is not None:
            return True
        if number != STOCK or size is Size.SCREEN or not self.finalists:
            return False
        return not any(self.of(trial.number, size).is_open for trial in self.finalists)

    def is_answered(self, number: int, size: Size) -> bool:
        """Whether a trial was asked as often as it has to be."""
        return len(self.of(number, size).answers) == len(self.passes(number, size))

    # --- what is asked ---

    def questions(self, number: int, size: Size) -> Questions:
        """What a trial is asked; the stock defaults as much as any finalist."""
        if size is Size.SCREEN:
            return self.typical(size)
        known = self.of(number, size)
        if known.questions is None and number == STOCK:
            each = [self.questions(trial.number, size) for trial in self.finalists]
            known.questions = for_all(each, self.typical(size))
        elif known.questions is None and number not in self.screened():
            return self.typical(size)
        elif known.questions is None:
            found = proving(self.suites, self.plan(size), self.rules.limits, self.seen(number))
            known.questions = found
        assert known.questions is not None
        return known.questions

    def enlist(self, trials: Iterable[Trial]) -> None:
        """Count these among those that the stock defaults will be compared with as finalists."""
        new = [trial for trial in trials if trial not in self.finalists]
        if not new or self.rules.size is Size.SCREEN:
            return
        self.finalists += new
        known = self.of(STOCK, self.rules.size)
        before = known.questions
        known.questions = None
        if before is None or self.questions(STOCK, self.rules.size).numbers != before.numbers:
            known.answers, known.missing = [], None

    def typical(self, size: Size) -> Questions:
        """What somebody is asked of whom nothing is known: in a screen everything.

        Else what can prove the limits.
        """
        if size not in self._typical:
            plan, limits = self.plan(size), self.rules.limits
            if size is Size.SCREEN:
                self._typical[size] = Questions(self.suites, plan, limits)
            else:
                self._typical[size] = proving(self.suites, plan, limits)
                for doubt in self._typical[size].doubts if size is self.rules.size else ():
                    self.bench.reporter.note(doubt)
        return self._typical[size]

    def plan(self, size: Size) -> SuitePlan:
        """The plan of all items of a size, for the context that the stock defaults have."""
        prompts = prompt_texts(self.workload.requests)[:MOST_PROMPTS]
        return SuitePlan(
            size, self.seed, self._context_tokens(), workload=prompts, data=self.rules.data
        )

    def passes(self, number: int, size: Size) -> list[Pass]:
        """How often a trial is asked, and how.

        The stock defaults are asked a screen twice at one server, because no other one is started
        so early, and what finalists are asked at two.
        """
        if number != STOCK:
            return [Pass("the candidate", self.seed, CONCURRENCY)]
        again = Pass(
            "the stock defaults again", self.seed + 1, AGAIN_CONCURRENCY, size is not Size.SCREEN
        )
        return [Pass("the stock defaults", self.seed, CONCURRENCY), again]

    def at_once(self, size: Size) -> int:
        """How often one server is asked at most."""
        return 2 if size is Size.SCREEN else 1

    @property
    def book(self) -> AnswerBook:
        """The answers that are kept."""
        return AnswerBook(self.store, self.bench.reporter, reuse=self.reuse)

    def served(self, number: int, arguments: Mapping[str, JsonValue]) -> ServedSubject:
        """A server of its own for a trial."""
        bench = self.bench
        spec = ServerSpec(
            model=bench.model,
            served_model_name=bench.served_model_name,
            arguments=arguments,
            environment=bench.environment,
        )
        return ServedSubject(
            bench.engine,
            spec,
            log_path=bench.log_dir / f"quality-{number}.log",
            start_timeout_s=bench.start_timeout_s,
            request_timeout_s=bench.plan.request_timeout_s,
        )

    # --- what it takes ---

    def missing(
        self, number: int, arguments: Mapping[str, JsonValue], size: Size
    ) -> tuple[str, ...]:
        """The suites that a trial would be asked now, for each time."""
        if self.is_settled(number, size):
            return ()
        known = self.of(number, size)
        if known.missing is None:
            passes = self.passes(number, size)[len(known.answers) :]
            subject = self.served(number, arguments)
            known.missing = self.book.missing(self.questions(number, size), subject, passes)
        return known.missing

    def stock_asks(
        self, numbers: Sequence[int], others: Sequence[Questions], size: Size
    ) -> tuple[Questions, tuple[str, ...]]:
        """What the stock defaults would be asked with these trials, and the suites it is of.

        `others` are the questions of these and of those that have no number yet.
        """
        listed = {trial.number for trial in self.finalists}
        if size is Size.SCREEN or (len(others) == len(numbers) and listed.issuperset(numbers)):
            names = self.missing(STOCK, self.study.base_arguments, size)
            return self.questions(STOCK, size), names
        questions = for_all(others, self.typical(size))
        if self.of(STOCK, size).unasked is not None or self.refusal() is not None:
            return questions, ()
        key = tuple(sorted(questions.numbers.items()))
        if key not in self._stock_missing:
            subject = self.served(STOCK, self.study.base_arguments)
            passes = self.passes(STOCK, size)
            self._stock_missing[key] = self.book.missing(questions, subject, passes)
        return questions, self._stock_missing[key]

    def price_s(self, questions: Questions, names: Iterable[str]) -> float:
        """What suites of these questions take, each as often as it is named."""
        return self.prices.of_s(questions, names, self.typical(Size.SCREEN))

    def finals_s(self) -> float:
        """What the finalists and the stock defaults have still to be asked."""
        size = self.rules.size
        trials = [(trial.number, trial.arguments) for trial in self.finalists]
        return sum(
            self.price_s(self.questions(number, size), self.missing(number, arguments, size))
            for number, arguments in [(STOCK, self.study.base_arguments), *trials]
        )

    # --- asking ---

    def ask(self, number: int, subject: Subject, size: Size, left_s: LeftS) -> list[Asked]:
        """Ask a trial what it was not asked yet, as far as one server is asked it.

        What ends it early is known afterwards: a report, or why it is asked no further.

        Raises:
            EngineError: the subject cannot be started, or dies.
        """
        known, passes = self.of(number, size), self.passes(number, size)
        now = passes[len(known.answers) :][: self.at_once(size)]
        later = len(passes) - len(known.answers) - len(now)
        watch = self._watch(number, size, later, left_s)
        try:
            found = self.book.ask(self.questions(number, size), subject, now, watch)
        except EnoughAsked as end:
            who = "the stock defaults" if number == STOCK else f"trial {number}"
            self.bench.reporter.note(f"{who}: {end}")
            return []
        known.answers = [*known.answers, *found]
        known.missing = None
        return found

    def _watch(self, number: int, size: Size, later: int, left_s: LeftS) -> Watch:
        """Looks at a finalist between its suites: whether the rest is of use, and fits the time."""
        known, questions = self.of(number, size), self.questions(number, size)

        def watch(answers: Sequence[Mapping[str, Asked]]) -> None:
            self.prices.learn(answers)
            known.missing = missing_names(questions, [*answers, *({} for _ in range(later))])
            if number != STOCK:
                self._stop_if_lost(number, answers[0])
            if known.missing and (needed_s := self.finals_s()) > left_s():
                known.unasked = out_of_time(size, needed_s)
                raise EnoughAsked(known.unasked)

        return (lambda answers: None) if size is Size.SCREEN else watch

    def _stop_if_lost(self, number: int, answers: Mapping[str, Asked]) -> None:
        """Judge a finalist early whom no more answers can save."""
        size = self.rules.size
        known, stock = self.of(number, size), self.of(STOCK, size).answers
        newest = [name for name in answers if name not in known.looked_at]
        if not newest or not stock:
            return
        known.looked_at |= set(newest)
        questions, (one,) = self.questions(number, size), self.passes(number, size)
        arguments = (trial.arguments for trial in self.finalists if trial.number == number)
        hidden = self.unscored(next(arguments, {}))
        report = lost_for_sure(questions, self.study.model, one, answers, newest, stock[0], hidden)
        if report is not None:
            self.store.save_quality_report(report, study=self.study, trial=number)
            known.report = report
            raise EnoughAsked(f"{words.summary(report)}; {NO_MORE}")

    def _context_tokens(self) -> int | None:
        """What the stock server said, or else what its arguments and the checkpoint say."""
        if self.effective is None:
            rows = [row for row in self.store.trials(self.study) if row.number == STOCK]
            found = rows[0].measurement if rows else None
            self.effective = None if found is None else found.effective
        said = None if self.effective is None else self.effective.max_model_len_tokens
        return said or self.served(STOCK, self.study.base_arguments).max_tokens


def for_all(every: Sequence[Questions], otherwise: Questions) -> Questions:
    """What somebody is asked who is compared with each of those that are asked these.

    A larger number of items of a suite holds the smaller ones. `otherwise`: nobody is asked.
    """
    if not every:
        return otherwise
    names = {name for one in every for name in one.numbers}
    numbers = {name: max(one.numbers.get(name, 0) for one in every) for name in names}
    same = next((one for one in every if one.numbers == numbers), None)
    return same or replace(every[0], numbers=numbers, too_few=())
