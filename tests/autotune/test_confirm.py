"""The confirmation: rounds in turned order within the time that is left."""

import pytest
from contracts.landscape import Recorder, failed, requests

from kvtune.autotune.confirm import confirm, merged
from kvtune.autotune.ledger import RequestSet
from kvtune.types import Choice, Harm, Measurement, PolicyStack, Status, Trial

LOAD = RequestSet(requests(4), "held out")


def trial(number):
    choice = Choice(policy="p", parameters={}, arguments={"n": number}, harm=Harm.LOSSLESS)
    stack = PolicyStack(choices=(choice,) if number else ())
    return Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)


@pytest.fixture
def confirmed(landscape, tuning_on):
    def go(numbers, rounds=3, reporter=None, tuning=None, **limits):
        tuning = tuning or tuning_on()
        for number in range(max(numbers) + 1):
            tuning.ledger.run(trial(number).stack, LOAD, repeats=1, seed=0, rung=1, canary=False)
        landscape.asked.clear()
        return confirm(
            [trial(number) for number in numbers],
            tuning.ledger,
            LOAD,
            reporter or Recorder(),
            rounds=rounds,
            seed=0,
            clock=landscape.clock,
            **limits,
        )

    return go


def test_every_round_measures_each_once_and_the_order_turns(confirmed, landscape):
    found = confirmed([0, 2, 3], rounds=4)
    assert landscape.confirmed == [0, 2, 3, 3, 2, 0, 0, 2, 3, 3, 2, 0]
    assert {number: len(one.metrics["ttft_p95_s"]) for number, one in found.items()} == {
        0: 4,
        2: 4,
        3: 4,
    }


def test_values_stand_in_the_order_of_the_rounds(confirmed, landscape):
    landscape.goodput = lambda arguments: 1.0 + 1000 * len(landscape.asked)
    found = confirmed([0, 1], rounds=3)
    for one in found.values():
        values = one.metrics["goodput_requests_per_s"]
        assert list(values) == sorted(values)


def test_no_round_begins_that_would_end_too_late(confirmed, landscape):
    landscape.trial_s = 10
    reporter = Recorder()
    found = confirmed([0, 1], reporter=reporter, until_s=landscape.now_s + 20 + 55, round_s=20.0)
    assert landscape.confirmed == [0, 1, 1, 0]
    assert len(found[0].metrics["ttft_p95_s"]) == 2
    assert reporter.notes == ["the time budget is spent after 2 rounds of confirmation"]


def test_without_time_for_one_round_there_is_nothing(confirmed, landscape):
    assert confirmed([0, 1], until_s=landscape.now_s + 1, round_s=5.0) == {}
    assert landscape.confirmed == []


def test_rounds_that_are_known_need_no_time_and_tell_nothing_of_what_others_take(
    confirmed, landscape, tuning_on
):
    landscape.trial_s = 10
    tuning = tuning_on()
    confirmed([0, 1], rounds=1, tuning=tuning)
    found = confirmed([0, 1], tuning=tuning, until_s=landscape.now_s + 19, round_s=20.0)
    assert landscape.confirmed == [], "the first round is known, and 19 s hold no other"
    assert len(found[0].metrics["ttft_p95_s"]) == 1
    found = confirmed([0, 1], tuning=tuning, until_s=landscape.now_s + 20, round_s=20.0)
    assert landscape.confirmed == [1, 0]
    assert len(found[0].metrics["ttft_p95_s"]) == 2


def test_questions_are_told_what_the_measurements_to_come_leave_of_the_time(confirmed, landscape):
    landscape.trial_s = 10
    landscape.serve = lambda arguments: None
    told = []

    def ask(trial, server, measurement, left_s):
        told.append(left_s())
        return measurement

    until_s = landscape.now_s + 20 + 100  # After the two trials of which it confirms.
    confirmed([0, 1], rounds=2, until_s=until_s, round_s=20.0, afterwards=ask)
    assert told == [60.0] * 4, "of 100 s, four measurements take 40"


def test_nobody_to_confirm_is_nothing(landscape, tuning_on):
    assert confirm([], tuning_on().ledger, LOAD, Recorder(), rounds=3, seed=0) == {}


def part(**metrics):
    return Measurement(
        status=Status.OK,
        metrics={name: (value,) for name, value in metrics.items()},
        counters=({"c": 1.0},),
        warnings=("late",),
    )


def test_parts_become_one_measurement_with_a_value_each():
    whole = merged([part(a=1.0, b=2.0), part(a=3.0)])
    assert whole.metrics == {"a": (1.0, 3.0)}
    assert whole.counters == ({"c": 1.0}, {"c": 1.0})
    assert whole.warnings == ("late",)


def test_one_failure_is_the_whole():
    assert merged([part(a=1.0), failed(), part(a=2.0)]) == failed()
