"""Everything that a measured trial has to pass before it may be shipped, in one place."""

from __future__ import annotations

from kvtune.autotune.canary_gate import Canary
from kvtune.autotune.ledger import Entry
from kvtune.autotune.quality import words
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.profilers.quality import traffic
from kvtune.types import Harm, Measurement


class Gates:
    """The long-prompt canary, the answers to the trial's own traffic, and the quality suites.

    All compare with the baseline's measurement. Without `quality`, suites are not asked.
    """

    def __init__(self, baseline: Measurement | None, quality: TrialQuality | None) -> None:
        self._baseline = baseline
        self._canary = Canary(baseline)
        self._quality = quality

    def objection(self, entry: Entry) -> str | None:
        """Why this trial may not be shipped; `None` when nothing that is known speaks against it.

        Traffic is looked at of lossless trials too; the rest is for what may change answers.
        """
        trial, found = entry.trial, entry.measurement
        reason = self._canary.objection(trial.stack, found)
        reason = reason or traffic.objection(found, self._baseline)
        if reason is None and self._quality is not None:
            reason = self._quality.objection(trial)
        return reason

    def unproved(self, entry: Entry) -> str | None:
        """Why a trial without an objection may not be recommended yet."""
        return None if self._quality is None else self._quality.unproved(entry.trial)

    def left_out(self, entry: Entry) -> str | None:
        """Why a trial that was good enough to be confirmed was not."""
        return None if self._quality is None else self._quality.left_out(entry.trial)

    def vouched(self, entry: Entry) -> str | None:
        """What is known of the answers of a recommended trial, if it may change them."""
        if entry.trial.stack.harm is Harm.LOSSLESS:
            return None
        found = None if self._quality is None else self._quality.verdict(entry.trial.number)
        return found or words.NOT_ASKED
