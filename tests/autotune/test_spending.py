"""What the rest of a search will take."""

from types import SimpleNamespace

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.spending import needed_s, trial_s
from kvtune.types import Measurement, PolicyStack, Status, Trial


def entry(number, wall_s, asked_s=0.0):
    trial = Trial(number=number, stack=PolicyStack(), base_arguments={}, repeats=1, seed=0)
    measurement = Measurement(status=Status.OK, wall_s=wall_s, asked_s=asked_s)
    return Entry(trial, measurement, reused=True)


POINTS = [entry(0, 30.0, 20.0), entry(1, 12.0), entry(2, 34.0, 20.0)]
"""They took 10, 12 and 14 seconds, and two were asked for 20 more."""


def test_a_trial_takes_what_trials_took_without_their_questions():
    assert trial_s(POINTS) == 12.0
    assert trial_s([]) == 0.0
    assert trial_s([entry(0, None)]) == 0.0


def test_a_trial_more_means_a_screen_more_and_the_confirmation_afterwards():
    budget = Budget(trials=9, finalists=2, confirm_rounds=3)
    assert needed_s(POINTS, [], budget, None) == 12 * (1 + 3 * 3) + 20
    quality = SimpleNamespace(expected_s=lambda chosen: 100.0 * len(chosen))
    assert needed_s(POINTS, POINTS[1:], budget, quality) == 12 * (1 + 3 * 3) + 20 + 200


def test_where_nothing_was_asked_nothing_is_set_aside():
    budget = Budget(trials=9, finalists=1, confirm_rounds=2, repeats=2)
    assert needed_s([POINTS[1]], [], budget, None) == 12 * (1 + 4 / 2)
