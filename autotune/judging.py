"""Have the answers of trials judged within the time that is left; most of them are asked by then.

Only what no server was asked while it was measured takes time here: it needs a server of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.spending import confirmation_s
from kvtune.types import Status


def judge_earlier(
    points: Sequence[Entry],
    quality: TrialQuality,
    budget: Budget,
    left_s: Callable[[], float],
    reporter: Reporter,
) -> None:
    """Judge the trials that an earlier search measured, while that leaves time to confirm."""
    for entry in points:
        if entry.measurement.status is not Status.OK:
            continue
        asking_s = quality.expected_s([entry], final=False)
        if asking_s and asking_s + confirmation_s(points, budget) > left_s():
            reporter.note("no time is left to ask all that an earlier search left unasked")
            return
        quality.judge(entry)


def judge_finalists(
    entries: Sequence[Entry],
    quality: TrialQuality,
    left_s: Callable[[], float],
    reporter: Reporter,
) -> None:
    """Judge those that were confirmed, or leave out whom there is no time to ask any more.

    Whoever takes longer than was thought is asked no further once the time does not hold the rest.

    Says at last what all servers that were started for questions took: it is part of no trial.
    """
    for entry in entries:
        asking_s = quality.expected_s([entry])
        if asking_s and asking_s > left_s():
            quality.leave_out([entry], asking_s)
        else:
            quality.judge(entry, final=True, left_s=left_s)
    if quality.spent_s >= 1:
        reporter.note(f"questions on servers of their own took {quality.spent_s:.0f} s")
