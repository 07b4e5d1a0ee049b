"""What one more measurement of each point is worth: by how much it should better the choice.

One step ahead: a draw of what would be believed of the point after a noisy measurement, and of the
best measured points through it, is compared with the best that is known now. This is expected
improvement where measurements are exact and of points that nobody measured; a point that was
measured already is worth another look where its noise could hide who is best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtune.autotune.explore.crashes import normal_cdf
from kvtune.autotune.explore.likeness import Floats, Ints
from kvtune.autotune.explore.responses import RATE, SHARE
from kvtune.autotune.explore.surrogate import Beliefs
from kvtune.autotune.explore.weighing import Weighing

RIVALS = 8
"""The best measured points that may turn out the best after all."""

EVERY = 4
"""Of so many draws one is looked at: one for each step would cost more than it tells."""

LEAST_VARIANCE = 1e-4
"""Of a limit: 1%, within which nobody can say whether it holds."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Beliefs of all responses by name; those that are not `RATE` or `SHARE` must be below 0.

    With a `weighing` the objective is what it makes of several.
    """

    beliefs: Mapping[str, Beliefs]
    weighing: Weighing | None = None

    @property
    def limits(self) -> list[str]:
        """The names of the responses that are limited."""
        return [name for name in self.beliefs if name not in (RATE, SHARE)]

    def objective(self, rate: Floats, odds: Floats | None, rows: Ints | None = None) -> Floats:
        """The objective of a log rate and the log odds of a good request.

        Args:
            rate: (..., points), or (..., rows, any) of the points in `rows` alone.
            odds: as `rate`.
            rows: which points.
        """
        value: Floats = np.exp(rate)
        value = value if odds is None else value / (1 + np.exp(-odds))
        return value if self.weighing is None else self.weighing.of(value, rows)

    def expected(self) -> Floats:
        """The objective times the probability that all limits hold, (points,)."""
        found = self.middle()
        for name in self.limits:
            one = self.beliefs[name]
            found = found * _holds(one.mean, one.variance)
        return found

    def middle(self) -> Floats:
        """The objective that is the likeliest, whatever the limits say, (points,)."""
        share = self.beliefs.get(SHARE)
        return self.objective(self.beliefs[RATE].mean, None if share is None else share.mean)

    def drawn(self) -> Floats:
        """Draws of the objective, (DRAWS, points)."""
        share = self.beliefs.get(SHARE)
        return self.objective(self.beliefs[RATE].draws, None if share is None else share.draws)

    def drawn_to_hold(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether all limits hold in each draw, (DRAWS, points)."""
        held = np.ones(self.beliefs[RATE].draws.shape, dtype=bool)
        for name in self.limits:
            held &= self.beliefs[name].draws <= 0
        return held

    def chance_to_hold(self) -> Floats:
        """The probability that all limits hold, (points,)."""
        found = np.ones(len(self.beliefs[RATE].mean))
        for name in self.limits:
            found *= _holds(self.beliefs[name].mean, self.beliefs[name].variance)
        return found


def worth(outlook: Outlook, measured: Ints) -> Floats:
    """What a measurement of each point adds to the objective of the choice, (points,).

    Args:
        outlook: what is believed.
        measured: the points among which the choice is made now.
    """
    expected = outlook.expected()
    first = np.argsort(-expected[measured], kind="stable")[:RIVALS]
    rivals = measured[first]
    own: dict[str, Floats] = {}
    theirs: dict[str, Floats] = {}
    held, held_theirs = np.ones(1), np.ones((1, 1, 1))
    for name, one in outlook.beliefs.items():
        # What is believed after the measurement moves less than the truth does: a part is noise.
        kept = one.variance / np.maximum(one.variance + one.noise, 1e-12)
        moved = (one.draws - one.draws.mean(axis=0))[::EVERY]
        after = np.sqrt(kept) * moved
        linked = one.links(rivals) / np.maximum(one.variance, 1e-12)
        own[name] = one.mean + after
        theirs[name] = one.mean[rivals, None] + linked * after[:, None, :]
        if name not in (RATE, SHARE):
            left = one.variance * (1 - kept)
            held = held * _holds(own[name], left)
            left_theirs = one.variance[rivals, None] - linked**2 * one.variance * kept
            held_theirs = held_theirs * _holds(theirs[name], left_theirs)
    of_point = outlook.objective(own[RATE], own.get(SHARE)) * held
    of_rivals = outlook.objective(theirs[RATE], theirs.get(SHARE), rivals) * held_theirs
    if not len(rivals):
        found: Floats = of_point.mean(axis=0)
        return found
    now = of_rivals.mean(axis=0).max(axis=0)
    best = np.maximum(of_point, of_rivals.max(axis=1))
    return np.asarray(np.maximum(best.mean(axis=0) - now, 0.0))


def surprise(outlook: Outlook, measured: Ints) -> Floats:
    """By how much each point betters all measured ones in draws in which it is best, (points,).

    Unlike `worth` it says nothing of a point that is merely a little better than the best known:
    in each draw only the best of all counts, as in Thompson sampling, by what it is better.

    Args:
        outlook: what is believed.
        measured: the points among which the choice is made now.
    """
    values = np.where(outlook.drawn_to_hold(), outlook.drawn(), 0.0)
    best = values.argmax(axis=1)
    known = values[:, measured].max(axis=1, initial=0.0)
    found = np.zeros(values.shape[1])
    np.add.at(found, best, values[np.arange(len(best)), best] - known)
    return found / len(best)


def _holds(log_excess: Floats, variance: Floats) -> Floats:
    return normal_cdf(-log_excess / np.sqrt(np.maximum(variance, LEAST_VARIANCE)))
