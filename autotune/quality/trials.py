"""The quality of a search's trials: asked at the servers that are measured, compared, and kept.

Every configuration that may change answers is asked a screen at its own trial's server, after the
load: it can only say no, or that it shows too much change for a proof. One that is confirmed is
asked as much as a proof takes, at a server of its confirmation, and has to pass. The stock defaults
are asked the same, twice: a screen at one server, and what finalists are asked at two, so that what
a restart changes counts as noise there. What is missing all the same (an interrupt, a measurement
that another study made) is asked on a server of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pydantic import JsonValue

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality import proof, words
from kvtune.autotune.quality.answers import Questions, answers_to, report_on
from kvtune.autotune.quality.asking import STOCK, Asking, Known, LeftS, unlimited_s
from kvtune.autotune.quality.sizing import asked_suites, own_suites, scores_limit
from kvtune.autotune.quality.subjects import StartedSubject
from kvtune.autotune.replays import death
from kvtune.autotune.trial import Bench, failure_of
from kvtune.engines.base import RunningServer
from kvtune.errors import EngineError
from kvtune.policies.unscored import unprovable
from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Size
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Failure,
    FailureClass,
    Harm,
    Measurement,
    PolicyStack,
    QualityReport,
    Status,
    Trial,
    Workload,
)


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
            if row.trial is not None and not row.report.unanswered:
                known = self._asking.of(row.trial, Size(row.report.size))
                if known.report is None:
                    self._learn(known, row.report)

    # --- asking ---

    def at_server(
        self,
        trial: Trial,
        server: RunningServer,
        measurement: Measurement,
        left_s: LeftS = unlimited_s,
    ) -> Measurement:
        """Ask the server of a trial, if its answers are of interest and not known.

        The measurement comes back with the time that it took. If the server died of the questions,
        what was measured before is as true as ever, and there is an objection to the trial; if it
        was that of the stock defaults, to all that may change answers. An interrupt ends the
        asking, and so does a finalist's lack of time: `left_s` tells what is left for questions.
        """
        number = trial.number if trial.parent is None else trial.parent
        size = Size.SCREEN if trial.parent is None else self.rules.size
        if number == STOCK:
            self._asking.effective = measurement.effective
        if number != STOCK and trial.stack.harm is Harm.LOSSLESS:
            return measurement
        if self._asking.is_settled(number, size) or self.unprovable(trial.stack) is not None:
            return measurement
        began_s = self.bench.clock()
        self._ask_started(number, size, trial.arguments, server, left_s)
        asked_s = self.bench.clock() - began_s
        wall_s = (measurement.wall_s or 0.0) + asked_s
        return measurement.model_copy(update={"asked_s": asked_s, "wall_s": wall_s})

    def judge(self, entry: Entry, *, final: bool = False, left_s: LeftS = unlimited_s) -> None:
        """Compare a trial's answers with the stock ones, and ask first for those that are missing.

        `final`: as a finalist, on all that the rules want, within `left_s`. Trials that cannot
        change answers, have failed, have a report or cannot be asked are left alone.
        """
        trial, asking = entry.trial, self._asking
        size = self.rules.size if final else Size.SCREEN
        known = asking.of(trial.number, size)
        if trial.stack.harm is Harm.LOSSLESS or entry.measurement.status is not Status.OK:
            return
        if not known.is_open or (self.refusal() or self.unprovable(trial.stack)) is not None:
            return
        if final:
            asking.enlist([trial])
        began_s = self.bench.clock()
        try:
            # Its answers come before the second time of the stock ones, which it may not need.
            first = self._answered(STOCK, self.study.base_arguments, size, left_s, times=1)
            ours = self._answered(trial.number, trial.arguments, size, left_s) if first else None
            theirs = self._answered(STOCK, self.study.base_arguments, size, left_s) if ours else []
        finally:
            self.spent_s += self.bench.clock() - began_s
        if not ours or not theirs:
            return
        known.answers = []  # With the scores of every token, they take megabytes.
        questions = asking.questions(trial.number, size)
        beside = [answers_to(questions, each) for each in theirs]
        hidden = asking.unscored(trial.arguments)
        report = report_on(questions, self.study.model, ours[0], *beside, unscored=hidden)
        self.store.save_quality_report(report, study=self.study, trial=trial.number)
        self._learn(known, report)
        if final or report.outcome != "fail":  # The search itself says who is out and why.
            self.bench.reporter.note(f"trial {trial.number}: {words.summary(report)}")

    def expected_s(
        self, entries: Sequence[Entry], *, newcomers: int = 0, final: bool = True
    ) -> float:
        """About how long it takes to ask these trials, and the stock defaults, what is missing.

        `final`: as finalists, at the servers of their confirmation, each what its screen has shown
        that a proof takes; else a screen, at servers that have to be started for it. `newcomers`
        are trials that may change answers and were not measured yet: they are thought to take as
        little as any that was screened. By what others took so far; see `Prices`.
        """
        asking, size = self._asking, self.rules.size if final else Size.SCREEN
        lossy = [
            trial
            for trial in (entry.trial for entry in entries)
            if trial.stack.harm is not Harm.LOSSLESS and self.unprovable(trial.stack) is None
        ]
        missing = [
            (asking.questions(trial.number, size), names)
            for trial in lossy
            if (names := asking.missing(trial.number, trial.arguments, size))
        ]
        if newcomers and asking.of(STOCK, size).unasked is None and self.refusal() is None:
            usual = self._least_asked(size)
            missing += [(usual, tuple(usual.counts))] * newcomers
        if not missing:
            return 0.0
        missing.append(
            asking.stock_asks(
                [trial.number for trial in lossy], [each for each, _ in missing], size
            )
        )
        starts = [one for entry in entries if (one := entry.measurement.start_s) is not None]
        start_s = median(starts) if starts and not final else 0.0
        return sum(
            asking.price_s(questions, names) + (start_s if names else 0.0)
            for questions, names in missing
        )

    # --- what came of it ---

    def objection(self, trial: Trial) -> str | None:
        """Why a trial may not be shipped, as far as it was asked; `None` if nothing is against it.

        What fails at any size is out, and a finalist that has to pass is out when it does not.
        """
        if trial.stack.harm is Harm.LOSSLESS:
            return None
        if (reason := self.unprovable(trial.stack)) is not None:
            return reason
        screen, final = self._reports_of(trial.number)
        for report in (final, screen):
            if report is not None and report.outcome == "fail":
                return words.summary(report)
        if final is not None and final.outcome == "unclear":
            return f"{words.summary(final)}{self._what_asks_more()}"
        if final is None:
            return (
                self._unprovable(trial.number)
                if screen
                else self._why_unasked(trial.number, Size.SCREEN)
            )
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
        return self._asking.refusal()

    @property
    def scores_limit(self) -> str:
        """A limit on scores of given texts, in words; empty without any."""
        return scores_limit(self._asking.suites, self.rules.limits)

    def unprovable(self, stack: PolicyStack) -> str | None:
        """Why a limit cannot be proved of a stack whatever it answers; `None` if it may be."""
        why = self._asking.unscored({**self.study.base_arguments, **stack.arguments})
        return unprovable(self.scores_limit, why) if why and self.scores_limit else None

    def begin_finals(
        self, chosen: Sequence[Entry], left_out: Sequence[Entry], needed_s: float
    ) -> None:
        """Say how long asking the finalists will take, and leave out those there is no time for."""
        self.leave_out(left_out, needed_s)
        lossy = [entry.trial for entry in chosen if entry.trial.stack.harm is not Harm.LOSSLESS]
        self._asking.enlist(lossy)
        minutes = math.ceil(self.expected_s(chosen) / 60)
        if minutes > 1:
            self.bench.reporter.note(
                "asking the finalists the questions of quality, and the stock defaults twice, will "
                f"take about {minutes} min"
            )

    def leave_out(self, entries: Sequence[Entry], needed_s: float) -> None:
        """Note that there is no time to ask those of these trials that would have to be asked."""
        asking, size = self._asking, self.rules.size
        for number in (e.trial.number for e in entries if e.trial.stack.harm is not Harm.LOSSLESS):
            reason = proof.no_time(asking.questions(number, size), asking.seen(number), needed_s)
            self._note_unasked(number, size, reason)

    def left_out(self, trial: Trial) -> str | None:
        """Why a trial could not be asked as a finalist; `None` if nothing was in the way."""
        return self._asking.of(trial.number, self.rules.size).unasked

    def verdict(self, number: int) -> str | None:
        """The last that is known of a trial's answers, in one line; `None` if nothing is."""
        report = self.report(number)
        return None if report is None else words.summary(report)

    def report(self, number: int) -> QualityReport | None:
        """The last report on a trial's answers."""
        screen, final = self._reports_of(number)
        return final or screen

    # --- the parts ---

    def _learn(self, known: Known, report: QualityReport) -> None:
        known.report = report
        if report.size == Size.SCREEN and report.wall_s:
            self._asking.prices.learn_screen(report.wall_s)

    def _reports_of(self, number: int) -> tuple[QualityReport | None, QualityReport | None]:
        """The reports of a trial: its screen, and as a finalist."""
        of = self._asking.of
        return of(number, Size.SCREEN).report, of(number, self.rules.size).report

    def _unprovable(self, number: int) -> str | None:
        """Why a trial that was screened cannot prove the limits; `None` if it may."""
        if self.rules.size is Size.SCREEN:
            return None
        questions = self._asking.questions(number, self.rules.size)
        return proof.unprovable(questions, self._asking.seen(number))

    def _least_asked(self, size: Size) -> Questions:
        """The questions of whoever needs the fewest of those that a screen was seen of."""
        asking = self._asking
        everyone = [asking.questions(number, size) for number in asking.screened()]
        return min(everyone, key=lambda one: one.count, default=asking.typical(size))

    def _why_unasked(self, number: int, size: Size) -> str:
        return (
            self.refusal()
            or self._asking.of(STOCK, size).unasked
            or self._asking.of(number, size).unasked
            or f"it may change answers, and was not asked the questions of quality at {size} size"
        )

    def _what_asks_more(self) -> str:
        larger = {Size.SCREEN: Size.STANDARD, Size.STANDARD: Size.FULL}.get(self.rules.size)
        if larger is None:
            return ""
        more, asked = (self._asking.typical(each).count for each in (larger, self.rules.size))
        if more <= asked:
            return ""
        return f"; --quality-size {larger} asks more"

    def _note_unasked(self, number: int, size: Size, reason: str) -> None:
        self._asking.of(number, size).unasked = reason
        self.bench.reporter.note(reason if number == STOCK else f"trial {number}: {reason}")

    def _answered(
        self,
        number: int,
        arguments: Mapping[str, JsonValue],
        size: Size,
        left_s: LeftS,
        times: int | None = None,
    ) -> list[Asked]:
        """What a trial answered, each time or so often; nothing where it cannot be asked."""
        asking = self._asking
        known = asking.of(number, size)
        times = times or len(asking.passes(number, size))
        while len(known.answers) < times and not asking.is_settled(number, size):
            try:
                asking.ask(number, asking.served(number, arguments), size, left_s)
            except EngineError as error:
                self._note_unasked(number, size, _cannot_ask(number, size, failure_of(error)))
        return known.answers if len(known.answers) >= times else []

    def _ask_started(
        self,
        number: int,
        size: Size,
        arguments: Mapping[str, JsonValue],
        server: RunningServer,
        left_s: LeftS,
    ) -> None:
        """Ask a server that runs already, until it dies or there is an interrupt."""

        def stopped() -> Failure | None:
            if self.bench.interrupts.came:
                return Failure(failure=FailureClass.UNKNOWN, message="it was interrupted")
            return server.failure()

        asking = self._asking
        known = asking.of(number, size)
        before = known.answers
        subject = StartedSubject(asking.served(number, arguments), server, stopped)
        try:
            found = asking.ask(number, subject, size, left_s)
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


def _cannot_ask(number: int, size: Size, failure: Failure) -> str:
    who = "the stock defaults" if number == STOCK else "it"
    return (
        f"{who} could not be asked the questions of quality at {size} size: "
        f"{failure.failure}: {failure.message}"
    )
