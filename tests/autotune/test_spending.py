"""What the rest of a search will take, and who is confirmed in the time that is left."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.autotune.spending import finals, needed_s, trial_s
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Goal,
    Harm,
    Measurement,
    PolicyStack,
    Status,
    Trial,
)


def entry(number, wall_s, asked_s=0.0, *, harm=Harm.LOSSLESS, goodput=1.0):
    choice = Choice(policy="p", parameters={}, arguments={"a": number}, harm=harm)
    stack = PolicyStack(choices=(choice,) if number else ())
    trial = Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)
    metrics = {"goodput_requests_per_s": (goodput,)}
    measurement = Measurement(status=Status.OK, wall_s=wall_s, asked_s=asked_s, metrics=metrics)
    return Entry(trial, measurement, reused=True)


class Asking:
    """Takes 20 s for a screen, and 100 s for a finalist that is not `known`."""

    def __init__(self, known=(), screened=(1,)):
        self.known = known
        self.screened = screened

    def expected_s(self, entries, *, newcomers=0, final=True):
        lossy = [one.trial for one in entries if one.trial.stack.harm is not Harm.LOSSLESS]
        asked = newcomers + sum(one.number not in self.known for one in lossy)
        return asked * (100.0 if final else 20.0)

    def verdict(self, number):
        return "screened" if number in self.screened else None


POINTS = [entry(0, 30.0, 20.0), entry(1, 12.0), entry(2, 34.0, 20.0)]
"""They took 10, 12 and 14 seconds, and two were asked for 20 more."""


def test_a_trial_takes_what_trials_took_without_their_questions():
    assert trial_s(POINTS) == 12.0
    assert trial_s([]) == 0.0
    assert trial_s([entry(0, None)]) == 0.0


def test_what_the_first_server_took_once_for_all_does_not_count_for_what_follows():
    parts = {"start_s": 3.0, "warmup_s": 1.0, "load_s": 12.0, "stop_s": 0.5}
    first = entry(0, 31.0)  # Of which 15 s went into the import of the engine.
    known = first.measurement.model_copy(update=parts)
    assert trial_s([replace(first, measurement=known)]) == 16.5


def test_what_was_given_up_early_does_not_say_what_a_whole_trial_takes():
    cut = entry(3, 1.0)
    seen = cut.measurement.model_copy(update={"status": Status.CUT, "share": 0.3})
    assert trial_s([*POINTS, replace(cut, measurement=seen)]) == 12.0


def test_a_trial_that_started_no_server_counts_as_if_it_had():
    started, changed = entry(0, 20.0), entry(1, 11.0)
    took = [started.measurement.model_copy(update={"start_s": 10.0})]
    live = {"start_s": 0.5, "effective": EffectiveConfig(start_kind="live")}
    took.append(changed.measurement.model_copy(update=live))
    points = [
        replace(one, measurement=measured)
        for one, measured in zip((started, changed), took, strict=True)
    ]
    # 11 s with half a second to change a server are 20.5 s with ten to start one.
    assert trial_s(points) == (20.0 + 20.5) / 2


def test_a_trial_more_means_the_confirmation_afterwards():
    budget = Budget(trials=9, finalists=2, confirm_rounds=3)
    for may_harm in (False, True):
        assert needed_s(POINTS, [], budget, None, may_harm=may_harm) == 12 * (1 + 3 * 3)
    twice = Budget(trials=9, finalists=1, confirm_rounds=2, repeats=2)
    assert needed_s([POINTS[1]], [], twice, None, may_harm=False) == 12 * (1 + 4 / 2)


def test_with_little_to_confirm_little_time_is_kept_for_it():
    budget = Budget(trials=9, finalists=2, confirm_rounds=8)
    kept = [needed_s(POINTS[:n], [], budget, None, may_harm=False) for n in (1, 2, 3)]
    # Three rounds of stock and one, or two others; then five as a rule.
    assert kept == [10 * (1 + 3 * 2), 11 * (1 + 3 * 3), 12 * (1 + 5 * 3)]


@pytest.mark.parametrize(
    ("finalists", "chosen", "may_harm", "asking_s"),
    [
        (2, 0, False, 0),
        (2, 2, False, 200),
        (2, 0, True, 20 + 100),
        (2, 1, True, 20 + 200),
        (2, 2, True, 20 + 200),
        (1, 1, True, 20 + 100),
    ],
)
def test_a_trial_that_may_change_answers_is_asked_a_screen_and_perhaps_as_a_finalist(
    finalists, chosen, may_harm, asking_s
):
    budget = Budget(trials=9, finalists=finalists, confirm_rounds=1)
    lossy = [entry(number, 12.0, harm=Harm.NEAR_LOSSLESS) for number in (3, 4)][:chosen]
    found = needed_s(POINTS, lossy, budget, Asking(), may_harm=may_harm)
    assert found == 12 * (1 + finalists + 1) + asking_s


def test_a_first_trial_is_not_kept_back_by_a_guess_of_what_finalists_take():
    budget = Budget(trials=9, finalists=1, confirm_rounds=1)
    found = needed_s(POINTS, [], budget, Asking(screened=()), may_harm=True)
    assert found == 12 * (1 + 2) + 20


BUDGET = Budget(trials=9, finalists=1, confirm_rounds=2)
LOSSY = [
    entry(0, 10.0),
    entry(1, 10.0, goodput=2.0),
    entry(2, 10.0, goodput=5.0, harm=Harm.NEAR_LOSSLESS),
    entry(3, 10.0, goodput=9.0, harm=Harm.NEAR_LOSSLESS),
]
"""Of trials that take 10 s the confirmation takes 40 s."""


@pytest.mark.parametrize(
    ("known", "left_s", "chosen", "left_out"),
    [
        ((), math.inf, 3, []),
        ((), 140.0, 3, []),
        ((), 139.0, 1, [3, 2]),
        ((2,), 139.0, 2, [3]),
        ((3,), 41.0, 3, []),
    ],
)
def test_whom_there_is_no_time_to_ask_is_left_out_for_the_best_that_need_not_be_asked(
    known, left_s, chosen, left_out
):
    gates = SimpleNamespace(objection=lambda entry: None)
    found = finals(Goal(), LOSSY, gates, BUDGET, Asking(known), left_s)
    assert [one.trial.number for one in found.chosen] == [chosen]
    assert [one.trial.number for one in found.left_out] == left_out
    assert found.asking_s == (100.0 if left_out else 0.0)


def test_a_finalist_that_takes_too_long_to_ask_gives_way_to_one_that_does_not():
    class Slow(Asking):
        def expected_s(self, entries, *, newcomers=0, final=True):
            times_s = {2: 60.0, 3: 100.0}
            return sum(times_s.get(one.trial.number, 0.0) for one in entries)

    gates = SimpleNamespace(objection=lambda entry: None)
    for finalists_, chosen in ((1, [2]), (2, [2, 1])):
        budget = Budget(trials=9, finalists=finalists_, confirm_rounds=1)
        left_s = 60.0 + 10.0 * (finalists_ + 1)
        found = finals(Goal(), LOSSY, gates, budget, Slow(), left_s)
        assert [one.trial.number for one in found.chosen] == chosen
        assert [one.trial.number for one in found.left_out] == [3]


def test_without_questions_nobody_is_left_out():
    gates = SimpleNamespace(objection=lambda entry: None)
    found = finals(Goal(), LOSSY, gates, BUDGET, None, 0.0)
    assert [one.trial.number for one in found.chosen] == [3]
    assert found.left_out == []
