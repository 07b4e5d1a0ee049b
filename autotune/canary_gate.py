"""Whether a configuration that may change answers still answers the long-prompt canary."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.profilers.quality.canary import CanaryReport, grade_canary, judge_canary
from kvtune.types import Harm, Measurement, PolicyStack


class Canary:
    """Compares trials with the baseline's answers; built from the baseline's measurement."""

    def __init__(self, baseline: Measurement | None) -> None:
        answers = None if baseline is None else baseline.canary_answers
        self._baseline = None if answers is None else _report(answers)

    def objection(self, stack: PolicyStack, measurement: Measurement) -> str | None:
        """Why this configuration may not be shipped; `None` when nothing speaks against it.

        Lossless configurations are not asked. Where the baseline's answers are missing or prove
        nothing, a configuration that may change answers is not vouched for.
        """
        if stack.harm is Harm.LOSSLESS:
            return None
        if self._baseline is None or measurement.canary_answers is None:
            return "it may change answers, and there is nothing to compare its answers with"
        verdict = judge_canary(_report(measurement.canary_answers), self._baseline)
        return None if verdict.outcome == "ok" else "; ".join(verdict.reasons)


def _report(answers: Sequence[str]) -> CanaryReport:
    return grade_canary(answers)
