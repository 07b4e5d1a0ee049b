"""The quality of a search's trials: asked at the servers that are measured, compared, and kept.

Every configuration that may change answers is asked a screen at its own trial's server, after the
load: it can only say no. One that is confirmed is asked as much as the rules want, at a server of
its confirmation, and has to pass. The stock defaults are asked the same, twice: a screen at one
server, and what finalists are asked at two, so that what a restart changes counts as noise there.
What is missing all the same (an interrupt, a measurement that another study made) is asked on a
server of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pydantic import JsonValue

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality import words
from kvtune.autotune.quality.answers import report_on
from kvtune.autotune.quality.asking import STOCK, Asking
from kvtune.autotune.quality.sizing import ITEM_S, asked_suites, check_limits, own_suites
from kvtune.autotune.quality.subjects import StartedSubject, Subject
from kvtune.autotune.trial import Bench, death, failure_of
from kvtune.engines.base import RunningServer
from kvtune.errors import BadGoal, EngineError
from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Size
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Failure,
    FailureClass,
    Harm,
    Measurement,
    QualityReport,
    Trial,
    Workload,
)


@dataclass(slots=True)
class _Known:
    """What is known of a trial's answers at one size.

    `answers` has one for each time that it was asked; `unasked` says why there are no more.
    `missing` counts the items that would be asked now.
    """

    answers: list[Asked] = field(default_factory=list)
    report: QualityReport | None = None
    unasked: str | None = None
    missing: int | None = None


@dataclass(slots=True)
class TrialQuality:
    """Asks and judges the trials of one study; reports that the history has are not made again.

    Where a side left items unanswered, it is asked again. `reuse=False` takes nothing from before.
    `spent_s` is the time that `judge` took for servers of its own.
    """

    rules: QualityRules
    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    seed: int
    reuse: bool = True
    spent_s: float = field(init=False, default=0.0)
    _asking: Asking = field(init=False)
    _known: dict[tuple[int, Size], _Known] = field(init=False, default_factory=dict)
    _is_checked: bool = field(init=False, default=False)
    _refusal: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._asking = Asking(
            (*asked_suites(), *own_suites(self.rules.data)),
            self.rules,
            self.study,
            self.store,
            self.bench,
            self.workload,
            self.seed,
            self.reuse,
        )
        for row in self.store.quality_reports(self.study) if self.reuse else ():
            if row.trial is None or row.report.unanswered:
                continue
            known = self._of(row.trial, Size(row.report.size))
            known.report = known.report or row.report

    # --- asking ---

    def at_server(
        self, trial: Trial, server: RunningServer, measurement: Measurement
    ) -> Measurement:
        """Ask the server of a trial, if its answers are of interest and not known.

        The measurement comes back with the time that it took. If the server died of the questions,
        what was measured before is as true as ever, and there is an objection to the trial; if it
        was that of the stock defaults, to all that may change answers. An interrupt ends the
        asking.
        """
        number = trial.number if trial.parent is None else trial.parent
        size = Size.SCREEN if trial.parent is None else self.rules.size
        if number == STOCK:
            self._asking.effective = measurement.effective
        if number != STOCK and trial.stack.harm is Harm.LOSSLESS:
            return measurement
        if self._is_settled(number, size):
            return measurement
        began_s = self.bench.clock()
        self._ask_started(number, size, trial.arguments, server)
        asked_s = self.bench.clock() - began_s
        wall_s = (measurement.wall_s or 0.0) + asked_s
        return measurement.model_copy(update={"asked_s": asked_s, "wall_s": wall_s})

    def judge(self, entry: Entry, *, final: bool = False) -> None:
        """Compare a trial's answers with the stock ones, and ask first for those that are missing.

        `final`: as a finalist, on all that the rules want. Trials that cannot change answers, have
        failed or have a report are left alone.
        """
        trial = entry.trial
        size = self.rules.size if final else Size.SCREEN
        known = self._of(trial.number, size)
        if trial.stack.harm is Harm.LOSSLESS or entry.measurement.failure is not None:
            return
        if known.report is not None or self.refusal() is not None:
            return
        began_s = self.bench.clock()
        try:
            theirs = self._answered(STOCK, self.study.base_arguments, size)
            ours = self._answered(trial.number, trial.arguments, size) if theirs else None
        finally:
            self.spent_s += self.bench.clock() - began_s
        if theirs is None or ours is None:
            return
        known.answers = []  # With the scores of every token, they take megabytes.
        report = report_on(self._asking.questions(size), self.study.model, ours[0], *theirs)
        self.store.save_quality_report(report, study=self.study, trial=trial.number)
        known.report = report
        if final or report.outcome != "fail":  # The search itself says who is out and why.
            self.bench.reporter.note(f"trial {trial.number}: {words.summary(report)}")

    def expected_s(
        self, entries: Sequence[Entry], *, newcomers: int = 0, final: bool = True
    ) -> float:
        """About how long it takes to ask these trials, and the stock defaults, what is missing.

        `final`: as finalists, at the servers of their confirmation; else a screen, at servers that
        have to be started for it. `newcomers` are trials that may change answers and were not
        measured yet. By what an item took so far, or `ITEM_S`.
        """
        size = self.rules.size if final else Size.SCREEN
        lossy = [entry.trial for entry in entries if entry.trial.stack.harm is not Harm.LOSSLESS]
        missing = [self._missing(trial.number, trial.arguments, size) for trial in lossy]
        if newcomers and self._of(STOCK, size).unasked is None:
            missing += [self._asking.questions(size).count] * newcomers
        if not any(missing):
            return 0.0
        missing.append(self._missing(STOCK, self.study.base_arguments, size))
        starts = [one for entry in entries if (one := entry.measurement.start_s) is not None]
        start_s = median(starts) if starts and not final else 0.0
        return sum(missing) * self._item_s(size) + start_s * sum(map(bool, missing))

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
        if final is not None and final.outcome == "unclear":
            return f"{words.summary(final)}{self._what_asks_more()}"
        if screen is None and final is None:
            return self._why_unasked(trial.number, Size.SCREEN)
        return None

    def unproved(self, trial: Trial) -> str | None:
        """Why a trial without an objection may not be recommended: it was not asked it all."""
        if trial.stack.harm is Harm.LOSSLESS or self._reports_of(trial.number)[1] is not None:
            return None
        return self._why_unasked(trial.number, self.rules.size)

    def refusal(self) -> str | None:
        """Why nothing that may change answers can be vouched for, whatever it answers.

        A limit may be on what the context of the stock defaults has no room for. Known once these
        are measured.
        """
        if not self._is_checked:
            self._is_checked = True
            try:
                plan = self._asking.plan(self.rules.size)
                check_limits(self._asking.suites, plan, self.rules.limits)
            except BadGoal as error:
                self._refusal = f"quality cannot be judged here: {error.message}"
        return self._refusal

    def begin_finals(
        self, chosen: Sequence[Entry], left_out: Sequence[Entry], needed_s: float
    ) -> None:
        """Say how long asking the finalists will take, and leave out those there is no time for."""
        self.leave_out(left_out, needed_s)
        minutes = math.ceil(self.expected_s(chosen) / 60)
        if minutes > 1:
            self.bench.reporter.note(
                "asking the finalists the questions of quality, and the stock defaults twice, will "
                f"take about {minutes} min"
            )

    def leave_out(self, entries: Sequence[Entry], needed_s: float) -> None:
        """Note that there is no time to ask those of these trials that would have to be asked."""
        size = self.rules.size
        for entry in entries:
            if entry.trial.stack.harm is not Harm.LOSSLESS:
                self._of(entry.trial.number, size).unasked = (
                    f"no time was left for the questions of quality at {size} size, "
                    f"about {needed_s:.0f} s"
                )

    def left_out(self, trial: Trial) -> str | None:
        """Why a trial could not be asked as a finalist; `None` if nothing was in the way."""
        return self._of(trial.number, self.rules.size).unasked

    def verdict(self, number: int) -> str | None:
        """The last that is known of a trial's answers, in one line; `None` if nothing is."""
        screen, final = self._reports_of(number)
        report = final or screen
        return None if report is None else words.summary(report)

    # --- the parts ---

    def _of(self, number: int, size: Size) -> _Known:
        return self._known.setdefault((number, size), _Known())

    def _reports_of(self, number: int) -> tuple[QualityReport | None, QualityReport | None]:
        """The reports of a trial: its screen, and as a finalist."""
        return self._of(number, Size.SCREEN).report, self._of(number, self.rules.size).report

    def _is_settled(self, number: int, size: Size) -> bool:
        """Whether asking a trial would tell nothing more, or could not be compared."""
        known = self._of(number, size)
        if known.report is not None or known.unasked is not None:
            return True
        if self._is_answered(number, size):
            return True
        return self._of(STOCK, size).unasked is not None or self.refusal() is not None

    def _is_answered(self, number: int, size: Size) -> bool:
        return len(self._of(number, size).answers) == len(self._asking.passes(number, size))

    def _missing(self, number: int, arguments: Mapping[str, JsonValue], size: Size) -> int:
        """How many items a trial would be asked now."""
        if self._is_settled(number, size):
            return 0
        known = self._of(number, size)
        if known.missing is None:
            asking = self._asking
            subject = asking.served(number, arguments)
            passes = asking.passes(number, size)[len(known.answers) :]
            known.missing = asking.book.missing(asking.questions(size), subject, passes)
        return known.missing

    def _item_s(self, size: Size) -> float:
        """What an item took in the reports so far, of this size if there are any."""
        for each in (size, Size.SCREEN):
            found = [
                known.report.wall_s
                for (_, its_size), known in self._known.items()
                if its_size is each and known.report is not None
                if known.report.wall_s is not None
            ]
            if found:
                return median(found) / max(1, self._asking.questions(each).count)
        return ITEM_S

    def _why_unasked(self, number: int, size: Size) -> str:
        return (
            self.refusal()
            or self._of(STOCK, size).unasked
            or self._of(number, size).unasked
            or f"it may change answers, and was not asked the questions of quality at {size} size"
        )

    def _what_asks_more(self) -> str:
        larger = {Size.SCREEN: Size.STANDARD, Size.STANDARD: Size.FULL}.get(self.rules.size)
        if larger is None:
            return ""
        more, asked = (self._asking.questions(each).count for each in (larger, self.rules.size))
        if more <= asked:
            return ""
        return f"; --quality-size {larger} asks more"

    def _note_unasked(self, number: int, size: Size, reason: str) -> None:
        self._of(number, size).unasked = reason
        self.bench.reporter.note(reason if number == STOCK else f"trial {number}: {reason}")

    def _answered(
        self, number: int, arguments: Mapping[str, JsonValue], size: Size
    ) -> list[Asked] | None:
        """What a trial answered, each time; `None` where it cannot be asked."""
        known = self._of(number, size)
        while known.unasked is None and not self._is_answered(number, size):
            try:
                self._ask(number, self._asking.served(number, arguments), size)
            except EngineError as error:
                self._note_unasked(number, size, _cannot_ask(number, size, failure_of(error)))
        return known.answers if self._is_answered(number, size) else None

    def _ask_started(
        self, number: int, size: Size, arguments: Mapping[str, JsonValue], server: RunningServer
    ) -> None:
        """Ask a server that runs already, until it dies or there is an interrupt."""

        def stopped() -> Failure | None:
            if self.bench.interrupts.came:
                return Failure(failure=FailureClass.UNKNOWN, message="it was interrupted")
            return server.failure()

        known = self._of(number, size)
        before = known.answers
        subject = StartedSubject(self._asking.served(number, arguments), server, stopped)
        try:
            found = self._ask(number, subject, size)
            failure = death(server) if any(asked.errors for asked in found) else None
        except EngineError as error:
            failure = failure_of(error)
        if failure is None:
            return
        known.answers = before
        if self.bench.interrupts.came:
            self.bench.reporter.note(
                "the questions were interrupted: what was measured is kept, and the same command "
                "asks what is missing"
            )
        elif number == STOCK:
            self._note_unasked(number, size, _cannot_ask(number, size, failure))
        else:
            known.unasked = (
                "while it was asked the questions of quality, after its load: "
                f"{failure.failure}: {failure.message}"
            )

    def _ask(self, number: int, subject: Subject, size: Size) -> list[Asked]:
        """Ask a trial what it was not asked yet, as far as one server is asked it."""
        known, asking = self._of(number, size), self._asking
        passes = asking.passes(number, size)[len(known.answers) :][: asking.at_once(size)]
        found = asking.book.ask(asking.questions(size), subject, passes)
        known.answers = [*known.answers, *found]
        known.missing = None
        if number == STOCK and size is Size.SCREEN:
            asking.learn(known.answers)
            for (_, its_size), other in self._known.items():
                if its_size is not Size.SCREEN:
                    other.answers, other.missing = [], None
        return found


def _cannot_ask(number: int, size: Size, failure: Failure) -> str:
    who = "the stock defaults" if number == STOCK else "it"
    return (
        f"{who} could not be asked the questions of quality at {size} size: "
        f"{failure.failure}: {failure.message}"
    )
