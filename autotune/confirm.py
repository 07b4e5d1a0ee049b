"""Measure the finalists and the baseline again: fresh servers, interleaved, on held-out requests.

Every round measures each of them once and the order turns round by round, so that a machine that
drifts favours nobody. A round that was complete before is taken as it is; of any other, all parts
are measured anew, since what was measured last week is not interleaved with today.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvtune.autotune.ledger import RUNG_CONFIRM, Ledger, RequestSet
from kvtune.autotune.reporting import Reporter
from kvtune.engines.base import RunningServer
from kvtune.types import Measurement, Status, Trial


class AsksAtServer(Protocol):
    """Asks a server that was measured, within `left_s`; see `trial.AtServer`."""

    def __call__(
        self,
        trial: Trial,
        server: RunningServer,
        measurement: Measurement,
        left_s: Callable[[], float],
    ) -> Measurement:
        """The measurement, with what came of the questions."""


def confirm(
    trials: Sequence[Trial],
    ledger: Ledger,
    requests: RequestSet,
    reporter: Reporter,
    *,
    rounds: int,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
    round_s: float = 0.0,
    until_s: float = math.inf,
    afterwards: AsksAtServer | None = None,
) -> dict[int, Measurement]:
    """Map the number of each trial to one measurement with a value per round.

    No round begins that would end after `until_s`, a time of `clock`; `round_s` is how long a round
    is thought to take, without what `afterwards`, which gets every server, asks it. That is told
    how much time the measurements to come leave it. Empty when there was no time for any.
    """

    def left_s(later: int) -> float:
        return until_s - clock() - later * round_s / len(trials)

    parts: dict[int, list[Measurement]] = {trial.number: [] for trial in trials}
    for number in range(rounds):
        round_seed = seed + 1 + number
        began_s = clock()
        known = all(
            ledger.has(trial.stack, parent=trial.number, seed=round_seed) for trial in trials
        )
        if not known and began_s + round_s > until_s:
            reporter.note(f"the time budget is spent after {number} rounds of confirmation")
            break
        asked_s = 0.0
        for place, trial in enumerate(trials if number % 2 == 0 else trials[::-1], 1):
            asking_s = partial(left_s, (rounds - number) * len(trials) - place)
            reporter.phase(f"Confirming trial {trial.number}, round {number + 1} of {rounds}")
            entry = ledger.run(
                trial.stack,
                requests,
                repeats=1,
                seed=round_seed,
                rung=RUNG_CONFIRM,
                canary=False,
                parent=trial.number,
                again=not known,
                afterwards=None if afterwards is None else partial(afterwards, left_s=asking_s),
            )
            reporter.trial(entry.trial, entry.measurement, reused=entry.reused)
            asked_s += 0.0 if entry.reused else entry.measurement.asked_s
            parts[trial.number].append(entry.measurement)
        if not known:
            round_s = clock() - began_s - asked_s
    return {number: merged(measured) for number, measured in parts.items() if measured}


def confirmed_before(ledger: Ledger) -> dict[int, Measurement]:
    """What complete rounds of the study say already, for a confirmation that was interrupted.

    Empty unless the baseline and another trial have at least two rounds in common.
    """
    rounds: dict[int, dict[int, Measurement]] = {}
    for entry in ledger.entries:
        if entry.trial.parent is not None:
            rounds.setdefault(entry.trial.seed, {})[entry.trial.parent] = entry.measurement
    common = [found for _, found in sorted(rounds.items()) if 0 in found and len(found) > 1]
    if len(common) < 2:
        return {}
    numbers = set.intersection(*(set(found) for found in common))
    if len(numbers) < 2:
        return {}
    return {number: merged([found[number] for found in common]) for number in sorted(numbers)}


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Single measurements of one configuration as one with a value each; a failure is the whole."""
    failed = next((part for part in parts if part.status is not Status.OK), None)
    if failed is not None:
        return failed
    names = [name for name in parts[0].metrics if all(name in part.metrics for part in parts)]
    return parts[0].model_copy(
        update={
            "metrics": {
                name: tuple(value for part in parts for value in part.metrics[name])
                for name in names
            },
            "counters": tuple(counters for part in parts for counters in part.counters),
            "warnings": tuple(dict.fromkeys(w for part in parts for w in part.warnings)),
        }
    )
