"""Ask a baseline twice and a candidate once, and compare: the work of `kvtune quality`.

The baseline's second time, with sampled answers drawn anew and another number of requests at once,
is the noise floor of every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtune.autotune.quality.answers import (
    AGAIN_CONCURRENCY,
    CONCURRENCY,
    AnswerBook,
    Pass,
    Questions,
    fitting,
    report_on,
    unasked,
)
from kvtune.autotune.quality.subjects import Subject
from kvtune.autotune.reporting import Reporter
from kvtune.policies.unscored import why_unscored
from kvtune.profilers.quality.compare import Asked
from kvtune.types import QualityReport

if TYPE_CHECKING:
    from kvtune.store.database import Store


@dataclass(slots=True)
class QualityRun:
    """Asks subjects, keeps answers, says how far it is.

    `restarts` puts a restart of the baseline between its two times, which then count as noise too.
    `reuse=False` asks again what is kept already.
    """

    questions: Questions
    history: Store
    reporter: Reporter
    restarts: bool = False
    reuse: bool = True
    concurrency: int = CONCURRENCY
    again_concurrency: int = AGAIN_CONCURRENCY

    def compare(self, model: str, baseline: Subject, candidate: Subject) -> QualityReport:
        """The report of a candidate, kept in the history.

        Raises:
            EngineError: one of the two cannot be started, or dies.
            BadInput: a suite cannot make items of the plan.
            NotFound: there is no such file of the user's own questions.
        """
        plan = fitting(self.questions.plan, baseline, candidate)
        self.questions = replace(self.questions, plan=plan)
        unasked(self.questions)  # Makes all items: what cannot be used is said before any start.
        seed = plan.seed
        first = Pass("the baseline", seed, self.concurrency)
        again = Pass("the baseline again", seed + 1, self.again_concurrency, self.restarts)
        if self.restarts:
            (theirs,), (repeat,) = self.ask(baseline, [first]), self.ask(baseline, [again])
        else:
            theirs, repeat = self.ask(baseline, [first, again])
        # The answers of a baseline that is its own candidate must not be compared with themselves.
        own = candidate.key is not None and candidate.key == baseline.key
        (ours,) = self.ask(candidate, [Pass("the candidate", seed, self.concurrency, own)])
        hidden = why_unscored(candidate.plugin, baseline.plugin)
        report = report_on(self.questions, model, ours, theirs, repeat, unscored=hidden)
        self.history.save_quality_report(report)
        return report

    def ask(self, subject: Subject, passes: Sequence[Pass]) -> list[Asked]:
        """What a subject answers each time; it is started only if something is not kept yet."""
        book = AnswerBook(self.history, self.reporter, reuse=self.reuse)
        return book.ask(self.questions, subject, passes)
