"""What confirmations that nothing passed say: who missed the goal there, and who would miss it too.

The best of many measurements had luck, and requests that a search has not seen may be harder. So a
search whose finalists all miss the goal goes on with what is left, see `tune`. All of this is taken
from the trials of the study, so that the same command comes to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from kvtune.autotune.confirm import BASELINE, is_over, merged, rounds_before
from kvtune.autotune.decide import mean_metrics, meets_goal, missed_by
from kvtune.autotune.ledger import Entry, Ledger
from kvtune.autotune.words import duration
from kvtune.profilers.goal import slo_key, slo_text
from kvtune.types import Goal, Measurement, Status

Confirmed = Mapping[int, Measurement]
"""What a confirmation says of each trial that was in it, by number."""


def missed_before(
    ledger: Ledger, goal: Goal, points: Sequence[Entry], *, rounds: int, seed: int
) -> list[Confirmed]:
    """The confirmations of a study in which nothing met the goal, the first one first.

    Those in which one of the `points` met it in the search: nothing new is said of the others. One
    that ended early, for want of time or by an interrupt, is none: it goes on. Nor is one whose
    finalists all failed: that says nothing of the goal.
    """
    met = {entry.trial.number for entry in points if meets_goal(goal, entry.measurement)}
    found: list[Confirmed] = []
    for each in rounds_before(ledger, seed):
        whole = {n: merged([one.measurement for one in own]) for n, own in each.items()}
        is_told = any(one.status is Status.OK for n, one in whole.items() if n != BASELINE)
        is_met = any(meets_goal(goal, one) for one in whole.values())
        is_new = not met.isdisjoint(whole)
        if is_new and is_told and not is_met and is_over(goal, each, rounds):
            found.append(whole)
    return found


def closest(goal: Goal, missed: Sequence[Confirmed]) -> Confirmed:
    """The confirmation of the trial that is closest to the goal; the first of several."""
    return min(missed, key=lambda one: min(missed_by(goal, own) for own in one.values()))


def hopeful(goal: Goal, points: Sequence[Entry], missed: Confirmed) -> list[Entry]:
    """The trials that may pass a confirmation although those of `missed` did not.

    They meet the goal with as much room as finalists that do as much harm turned out to need: the
    mean ratio of what these took on held-out requests to what they took in the search.
    """
    told = [(e, missed[n]) for e in points if (n := e.trial.number) in missed and n != BASELINE]

    def is_hopeful(entry: Entry) -> bool:
        like = [
            (mean_metrics(first.measurement), mean_metrics(last))
            for first, last in told
            if first.trial.stack.harm is entry.trial.stack.harm
        ]
        own = mean_metrics(entry.measurement)
        for slo in goal.slos:
            key = slo_key(slo)
            ratios = [
                last[key] / first[key] for first, last in like if key in last and first.get(key)
            ]
            harder = max(1.0, fmean(ratios)) if ratios else 1.0
            if key not in own or own[key] * harder > slo.limit_s:
                return False
        return True

    return [one for one in points if one.trial.number not in missed and is_hopeful(one)]


def miss_text(goal: Goal, confirmed: Measurement) -> str:
    """Why a trial of `missed` is out: what it missed in its confirmation, or how it failed."""
    if (failure := confirmed.failure) is not None:
        return f"{failure.failure}: {failure.message}"
    found = mean_metrics(confirmed)
    misses = [
        f"{slo_text(slo)} was missed: measured {duration(value)}"
        for slo in goal.slos
        if (value := found.get(slo_key(slo), math.inf)) > slo.limit_s
    ]
    return f"when it was confirmed, {', '.join(misses)}"
