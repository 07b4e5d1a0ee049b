"""Whether a configuration that may change answers still answers the long-prompt canary."""

from __future__ import annotations

from kvtune.policies.plugin_arguments import asked_by
from kvtune.profilers.quality.canary import CanaryReport, grade_canary, judge_canary
from kvtune.types import Harm, Measurement, PolicyStack


class Canary:
    """Compares trials with the baseline's answers; built from the baseline's measurement."""

    def __init__(self, baseline: Measurement | None) -> None:
        self._baseline = None if baseline is None else _report(baseline)

    def objection(self, stack: PolicyStack, measurement: Measurement) -> str | None:
        """Why this configuration may not be shipped; `None` when nothing speaks against it.

        Lossless configurations are not asked. Where the baseline's answers are missing or prove
        nothing, a configuration that may change answers is not vouched for. What answers without a
        part of long contexts may forget facts of them: how many is for the quality suites to judge,
        whose limits are the user's.
        """
        if stack.harm is Harm.LOSSLESS:
            return None
        ours = _report(measurement)
        if self._baseline is None or ours is None:
            return "it may change answers, and there is nothing to compare its answers with"
        whole = asked_by(stack.arguments).whole_context_tokens
        verdict = judge_canary(ours, self._baseline, whole_tokens=whole)
        return None if verdict.outcome == "ok" else "; ".join(verdict.reasons)


def _report(found: Measurement) -> CanaryReport | None:
    if found.canary_answers is None:
        return None
    context = None if found.effective is None else found.effective.max_model_len_tokens
    return grade_canary(found.canary_answers, context)
