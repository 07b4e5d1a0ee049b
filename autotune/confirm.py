"""Measure the finalists and the baseline again: fresh servers, interleaved, on held-out requests.

Every round measures each of them once and the order turns round by round, so that a machine that
drifts favours nobody. After some rounds they are looked at, and only those go on whose outcome is
open (`comparing`). A round that was measured before, in one sitting, is taken as it is; of any
other all parts are measured anew, since what was measured last week is not interleaved with today.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Protocol

from kvtune.autotune.comparing import Next, next_round
from kvtune.autotune.decide import meets_goal, objective_values, rounds_of
from kvtune.autotune.ledger import RUNG_CONFIRM, Entry, Ledger, RequestSet
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.rounds import Confirming, next_look, rounds_left, turned
from kvtune.engines.base import RunningServer
from kvtune.types import Goal, Harm, Measurement, Status, Trial

BASELINE = 0
"""Its number in every study."""

CONFIRMATION_SEED = 100
"""What each further confirmation of a study adds to the seed; one has fewer rounds than that."""


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
    goal: Goal,
    rounds: int,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
    trial_s: float = 0.0,
    until_s: float = math.inf,
    afterwards: AsksAtServer | None = None,
) -> dict[int, Measurement]:
    """Map the number of each trial to one measurement with a value per round that it was in.

    There are at most `rounds`. None begins that would end after `until_s`, a time of `clock`;
    `trial_s` is how long a measurement is thought to take, without what `afterwards`, which gets
    every server, asks it. That is told how much time is left by the measurements until the next
    look. Empty when there was no time for any, or nothing to compare the baseline with.
    """
    if all(trial.number == BASELINE for trial in trials):
        return {}

    def left_s(later: int) -> float:
        return until_s - clock() - later * trial_s

    parts: dict[int, list[Measurement]] = {trial.number: [] for trial in trials}
    sure = [trial.number for trial in trials if trial.stack.harm is Harm.LOSSLESS]
    going = list(trials)
    asked_s = 0.0

    def tell(number: int, measurements: int) -> None:
        """Say where round `number` stands, with so many measurements left as a rule."""
        values, left_s = _means(goal, parts), measurements * trial_s
        reporter.confirming(Confirming(number + 1, rounds, values, left_s, asked_s))

    for number in range(rounds):
        round_seed = seed + 1 + number
        began_s, asked_before_s = clock(), asked_s
        sittings = {
            ledger.sitting(trial.stack, parent=trial.number, seed=round_seed) for trial in going
        }
        known = len(sittings) == 1 and None not in sittings
        if not known and began_s + trial_s * len(going) > until_s:
            reporter.note(f"the time budget is spent after {number} rounds of confirmation")
            tell(max(0, number - 1), 0)
            break
        rounds_later = next_look(number, rounds) - number
        usually = rounds_left(number, rounds) * len(going)
        tell(number, usually)
        for place, trial in enumerate(turned(going, number), 1):
            asking_s = partial(left_s, rounds_later * len(going) - place)
            reporter.phase(
                f"Confirming trial {trial.number}, round {number + 1} of at most {rounds}"
            )
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
            tell(number, usually - place)
        if not known and going:
            trial_s = (clock() - began_s - (asked_s - asked_before_s)) / len(going)
        following = _following(goal, sure, parts, rounds)
        going = [trial for trial in trials if trial.number in following.going]
        if not going:
            if following.why:
                reporter.note(f"the confirmation ends with round {number + 1}: {following.why}")
            tell(number, 0)
            break
    return {number: merged(measured) for number, measured in parts.items() if measured}


def _means(goal: Goal, parts: Mapping[int, Sequence[Measurement]]) -> dict[int, float]:
    """The mean objective of each trial that was measured so far and did not fail."""
    found = {
        number: objective_values(goal, merged(measured))
        for number, measured in parts.items()
        if measured
    }
    return {number: fmean(values) for number, values in found.items() if values}


def _following(
    goal: Goal, sure: Collection[int], parts: Mapping[int, Sequence[Measurement]], rounds: int
) -> Next:
    """Who is measured in the next round, by all that were measured so far; see `next_round`."""
    found = {number: merged(own) for number, own in parts.items()}
    values = {number: rounds_of(goal, one) for number, one in found.items()}
    return next_round(
        {number: own for number, own in values.items() if own},
        BASELINE,
        rounds,
        able=[number for number, one in found.items() if meets_goal(goal, one)],
        sure=sure,
    )


Rounds = Mapping[int, Sequence[Entry]]
"""The rounds of one confirmation by the number of a trial, from the first one on."""


def rounds_before(ledger: Ledger, seed: int) -> list[Rounds]:
    """What each confirmation of the study has measured already, the first one first.

    Of each trial, the rounds that it was in beside the baseline, in the same sitting; without a
    baseline all. `seed` is the study's: each confirmation has `CONFIRMATION_SEED` of its own.
    """
    confirmations: dict[int, dict[int, dict[int, Entry]]] = {}
    for entry in ledger.entries:
        if entry.rung == RUNG_CONFIRM and entry.trial.parent is not None:
            turn, place = divmod(entry.trial.seed - seed - 1, CONFIRMATION_SEED)
            rounds = confirmations.setdefault(turn, {})
            rounds.setdefault(place, {})[entry.trial.parent] = entry
    return [_together(rounds) for _, rounds in sorted(confirmations.items())]


def _together(rounds: Mapping[int, Mapping[int, Entry]]) -> Rounds:
    parts: dict[int, list[Entry]] = {}
    has_stock = any(BASELINE in found for found in rounds.values())
    for place, found in sorted(rounds.items()):
        stock = found.get(BASELINE)
        for number, entry in sorted(found.items()):
            own = parts.setdefault(number, [])
            is_beside = stock is not None and entry.sitting == stock.sitting
            if len(own) == place and (is_beside or not has_stock):
                own.append(entry)
    return {number: own for number, own in parts.items() if own}


def is_over(goal: Goal, found: Rounds, rounds: int) -> bool:
    """Whether nobody would be measured after these rounds, of which there are at most `rounds`."""
    most = max((len(own) for number, own in found.items() if number != BASELINE), default=0)
    parts = {number: [e.measurement for e in own[:most]] for number, own in found.items()}
    sure = [n for n, own in found.items() if own[0].trial.stack.harm is Harm.LOSSLESS]
    return most > 0 and not _following(goal, sure, parts, rounds).going


def confirmed_before(ledger: Ledger, seed: int = 0) -> dict[int, Measurement]:
    """What the last rounds of the study say already, for a confirmation that was interrupted.

    Those of the last confirmation in which the baseline and another trial have at least two.
    """
    for found in reversed(rounds_before(ledger, seed)):
        kept = {n: merged([e.measurement for e in own]) for n, own in found.items() if len(own) > 1}
        if BASELINE in kept and len(kept) > 1:
            return kept
    return {}


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
            # At a boundary they may be of several loads; counting noise is that of the smallest.
            "requests_per_repeat": min(part.requests_per_repeat for part in parts),
        }
    )
