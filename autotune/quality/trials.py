"""The quality of a search's trials: asked at the servers that are measured, compared, and kept.

Every configuration that may change answers is asked a screen at its own trial's server, after the
load: it can only say no. One that is confirmed is asked as much as the rules want, at a server of
its confirmation, and has to pass. The stock defaults are asked the same, twice. What is missing
all the same (an interrupt, a measurement that another study made) is asked on a server of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pydantic import JsonValue

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality import words
from kvtune.autotune.quality.answers import (
    AGAIN_CONCURRENCY,
    CONCURRENCY,
    AnswerBook,
    Pass,
    Questions,
    fitting,
    prompt_texts,
    report_on,
)
from kvtune.autotune.quality.subjects import ServedSubject, StartedSubject, Subject
from kvtune.autotune.trial import Bench, death, failure_of
from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.errors import BadGoal, EngineError
from kvtune.profilers.quality.compare import Asked, plan_for
from kvtune.profilers.quality.limits import Limit, limit_text, parse_limits
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan, suites
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Failure,
    FailureClass,
    Harm,
    Measurement,
    QualityReport,
    Status,
    Trial,
    Workload,
)

STOCK = 0
"""The number of the trial with the stock defaults."""

MOST_PROMPTS = 256
"""So many prompts of the workload are given to suites: as many as any of them would take."""

OWN_DATA = "yours"
"""The suite that has nothing to ask without a file of the user's."""


def asked_suites() -> tuple[Suite, ...]:
    """All suites but the one that needs data."""
    return tuple(suite for name, suite in suites().items() if name != OWN_DATA)


def read_limits(texts: Sequence[str], size: Size, workload: Workload) -> tuple[Limit, ...]:
    """Read limits that a search can hold answers against.

    Raises:
        BadGoal: a text is no limit, or it is about something that is not asked at this size.
    """
    known = {suite.name: suite for suite in asked_suites()}
    limits = parse_limits(texts, known)
    plan = SuitePlan(size=size, workload=prompt_texts(workload.requests)[:MOST_PROMPTS])
    for limit in limits:
        asked = known[limit.suite].items(plan) if limit.suite in known else ()
        categories = sorted({item.category for item in asked})
        if limit.category is not None and not any(map(limit.is_of, categories)):
            raise BadGoal(
                f"{limit_text(limit)!r}: {limit.suite} has no category {limit.category!r} at "
                f"{size} size",
                f"choose from {', '.join(categories)}" if categories else "leave the category out",
            )
    return limits


@dataclass(slots=True)
class TrialQuality:
    """Asks and judges the trials of one study; reports that the history has are not made again.

    `reuse=False` takes no answers that were given before.
    """

    rules: QualityRules
    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    seed: int
    reuse: bool = True
    _questions: dict[Size, Questions] = field(init=False, default_factory=dict)
    _answers: dict[tuple[int, Size], list[Asked]] = field(init=False, default_factory=dict)
    _reports: dict[tuple[int, Size], QualityReport] = field(init=False, default_factory=dict)
    _unasked: dict[tuple[int, Size], str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.store.quality_reports(self.study):
            if row.trial is not None:
                self._reports.setdefault((row.trial, Size(row.report.size)), row.report)

    # --- asking ---

    def at_server(
        self, trial: Trial, server: RunningServer, measurement: Measurement
    ) -> Measurement:
        """Ask the server of a trial, if its answers are of interest and not known.

        The measurement comes back with the time that it took. It comes back as a failure if the
        server died of the questions, but for the stock defaults: without their answers nothing
        that may change answers can win, and all else still can. An interrupt ends the asking.
        """
        number = trial.number if trial.parent is None else trial.parent
        size = Size.SCREEN if trial.parent is None else self.rules.size
        known = (number, size) in self._answers or (number, size) in self._reports
        cannot_compare = (STOCK, size) in self._unasked
        is_of_interest = number == STOCK or trial.stack.harm is not Harm.LOSSLESS
        if known or cannot_compare or not is_of_interest:
            return measurement
        began_s = self.bench.clock()
        failure = self._ask_started(number, size, trial.arguments, server)
        asked_s = self.bench.clock() - began_s
        wall_s = (measurement.wall_s or 0.0) + asked_s
        if failure is None or number == STOCK or self.bench.interrupts.came:
            return measurement.model_copy(update={"asked_s": asked_s, "wall_s": wall_s})
        return Measurement(
            status=Status.FAILED,
            failure=failure,
            effective=measurement.effective,
            start_s=measurement.start_s,
            wall_s=wall_s,
            asked_s=asked_s,
            versions=measurement.versions,
            measured_at=measurement.measured_at,
        )

    def judge(self, entry: Entry, *, final: bool = False) -> None:
        """Compare a trial's answers with the stock ones, and ask first for those that are missing.

        `final`: as a finalist, on all that the rules want. Trials that cannot change answers, have
        failed or have a report are left alone.
        """
        trial = entry.trial
        size = self.rules.size if final else Size.SCREEN
        at = (trial.number, size)
        if trial.stack.harm is Harm.LOSSLESS or entry.measurement.failure is not None:
            return
        if at in self._reports:
            return
        theirs = self._answered(STOCK, self.study.base_arguments, size)
        ours = self._answered(trial.number, trial.arguments, size) if theirs else None
        if theirs is None or ours is None:
            return
        del self._answers[at]  # With the scores of every token, they take megabytes.
        report = report_on(self._asking(size), self.study.model, ours[0], *theirs)
        self.store.save_quality_report(report, study=self.study, trial=trial.number)
        self._reports[at] = report
        if final or report.outcome != "fail":  # The search itself says who is out and why.
            self.bench.reporter.note(f"trial {trial.number}: {words.summary(report)}")

    def expected_s(self, entries: Sequence[Entry]) -> float:
        """About how long it takes to ask these trials as finalists, and the stock defaults.

        By what an item took in the screens so far; 0 where there was none.
        """
        screens = [
            report.wall_s
            for (_, size), report in self._reports.items()
            if size is Size.SCREEN and report.wall_s is not None
        ]
        size = self.rules.size
        missing = sum(
            entry.trial.stack.harm is not Harm.LOSSLESS
            and (entry.trial.number, size) not in self._reports
            for entry in entries
        )
        if not screens or not missing:
            return 0.0
        passes = missing + (0 if (STOCK, size) in self._answers else 2)
        items = [self._asking(each).count for each in (size, Size.SCREEN)]
        return median(screens) * passes * items[0] / items[1]

    # --- what came of it ---

    def objection(self, trial: Trial) -> str | None:
        """Why a trial may not be shipped, as far as it was asked; `None` if nothing is against it.

        What fails at any size is out, and a finalist that has to pass is out when it does not.
        """
        if trial.stack.harm is Harm.LOSSLESS:
            return None
        screen, final = self._reports_of(trial.number)
        for report in (final, screen):
            if report is not None and report.outcome == "fail":
                return words.summary(report)
        if final is not None and final.outcome == "unclear" and self.rules.wants_proof:
            more = "" if self.rules.size is Size.FULL else "; --quality-size full asks more"
            return f"{words.summary(final)}{more}"
        if screen is None and final is None:
            return self._why_unasked(trial.number, Size.SCREEN)
        return None

    def unproved(self, trial: Trial) -> str | None:
        """Why a trial without an objection may not be recommended: it was not asked it all."""
        if trial.stack.harm is Harm.LOSSLESS or self._reports_of(trial.number)[1] is not None:
            return None
        return self._why_unasked(trial.number, self.rules.size)

    def leave_out(self, entries: Sequence[Entry], needed_s: float) -> None:
        """Note that there is no time to ask those of these trials that would have to be asked."""
        size = self.rules.size
        for entry in entries:
            if entry.trial.stack.harm is not Harm.LOSSLESS:
                self._unasked[entry.trial.number, size] = (
                    f"no time was left for the questions of quality at {size} size, "
                    f"about {needed_s:.0f} s"
                )

    def left_out(self, trial: Trial) -> str | None:
        """Why a trial could not be asked as a finalist; `None` if nothing was in the way."""
        return self._unasked.get((trial.number, self.rules.size))

    def verdict(self, number: int) -> str | None:
        """The last that is known of a trial's answers, in one line; `None` if nothing is."""
        screen, final = self._reports_of(number)
        report = final or screen
        return None if report is None else words.summary(report)

    # --- the parts ---

    def _reports_of(self, number: int) -> tuple[QualityReport | None, QualityReport | None]:
        """The reports of a trial: its screen, and as a finalist."""
        return self._reports.get((number, Size.SCREEN)), self._reports.get(
            (number, self.rules.size)
        )

    def _why_unasked(self, number: int, size: Size) -> str:
        default = (
            f"it may change answers, and was not asked the questions of quality at {size} size"
        )
        return self._unasked.get((STOCK, size)) or self._unasked.get((number, size)) or default

    def _note_unasked(self, number: int, size: Size, failure: Failure) -> None:
        who = "the stock defaults" if number == STOCK else "it"
        reason = (
            f"{who} could not be asked the questions of quality at {size} size: "
            f"{failure.failure}: {failure.message}"
        )
        self._unasked[number, size] = reason
        self.bench.reporter.note(reason if number == STOCK else f"trial {number}: {reason}")

    def _answered(
        self, number: int, arguments: Mapping[str, JsonValue], size: Size
    ) -> list[Asked] | None:
        """What a trial answered, each time; `None` where it cannot be asked."""
        if (number, size) not in self._answers and (number, size) not in self._unasked:
            try:
                served = self._served(number, arguments)
                self._answers[number, size] = self._ask(number, served, size)
            except EngineError as error:
                self._note_unasked(number, size, failure_of(error))
        return self._answers.get((number, size))

    def _ask_started(
        self, number: int, size: Size, arguments: Mapping[str, JsonValue], server: RunningServer
    ) -> Failure | None:
        """Ask a server that runs already; returns why that had to end, if it had to."""

        def stopped() -> Failure | None:
            if self.bench.interrupts.came:
                return Failure(failure=FailureClass.UNKNOWN, message="it was interrupted")
            return server.failure()

        subject = StartedSubject(self._served(number, arguments), server, stopped)
        try:
            found = self._ask(number, subject, size)
            failure = death(server) if any(asked.errors for asked in found) else None
        except EngineError as error:
            failure = failure_of(error)
        if failure is None:
            self._answers[number, size] = found
        elif self.bench.interrupts.came:
            self.bench.reporter.note(
                "the questions were interrupted: what was measured is kept, and the same command "
                "asks what is missing"
            )
        elif number == STOCK:
            self._note_unasked(number, size, failure)
        return failure

    def _ask(self, number: int, subject: Subject, size: Size) -> list[Asked]:
        once = Pass("the candidate", self.seed, CONCURRENCY)
        twice = [
            Pass("the stock defaults", self.seed, CONCURRENCY),
            Pass("the stock defaults again", self.seed + 1, AGAIN_CONCURRENCY),
        ]
        book = AnswerBook(self.store, self.bench.reporter, reuse=self.reuse)
        return book.ask(self._asking(size), subject, twice if number == STOCK else [once])

    def _asking(self, size: Size) -> Questions:
        if size not in self._questions:
            prompts = prompt_texts(self.workload.requests)[:MOST_PROMPTS]
            plan = SuitePlan(size=size, seed=self.seed, workload=prompts)
            if size is Size.FULL:
                plan = plan_for(self.rules.limits, plan)
            stock = self._served(STOCK, self.study.base_arguments)
            self._questions[size] = Questions(
                asked_suites(), fitting(plan, stock), self.rules.limits
            )
        return self._questions[size]

    def _served(self, number: int, arguments: Mapping[str, JsonValue]) -> ServedSubject:
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
