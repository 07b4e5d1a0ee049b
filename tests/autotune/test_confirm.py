"""The confirmation: rounds in turned order, until what is open is settled or the time is spent."""

from types import SimpleNamespace

import pytest
from contracts.landscape import GOAL, Recorder, failed, requests

from kvtune.autotune.confirm import confirm, confirmed_before, merged
from kvtune.autotune.ledger import RUNG_CONFIRM, RequestSet
from kvtune.types import Choice, Harm, Measurement, PolicyStack, Status, Trial

LOAD = RequestSet(requests(4), "held out")


def trial(number, harm=Harm.LOSSLESS):
    choice = Choice(policy="p", parameters={}, arguments={"n": number}, harm=harm)
    stack = PolicyStack(choices=(choice,) if number else ())
    return Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)


@pytest.fixture
def confirmed(landscape, tuning_on):
    def go(numbers, rounds=3, reporter=None, tuning=None, harmful=(), **limits):
        tuning = tuning or tuning_on()
        for number in range(max(numbers) + 1):
            tuning.ledger.run(trial(number).stack, LOAD, repeats=1, seed=0, rung=1, canary=False)
        landscape.asked.clear()
        return confirm(
            [trial(n, Harm.NEAR_LOSSLESS if n in harmful else Harm.LOSSLESS) for n in numbers],
            tuning.ledger,
            LOAD,
            reporter or Recorder(),
            goal=GOAL,
            rounds=rounds,
            seed=0,
            clock=landscape.clock,
            **limits,
        )

    return go


def noisy(landscape, gains, spread):
    """Give trial n `gains[n]`, in every round that many times as much or as little as `spread`."""
    up_and_down = (1, -1, 0.3, -0.6, 0.8, -0.2, 0.5, -0.9, -0.4)

    def goodput(arguments):
        n = arguments.get("n", 0)
        turn = sum(one.trial.parent == n for one in landscape.asked) - 1
        return gains[n] * (1 + spread * up_and_down[(turn + 2 * n) % 9])

    landscape.goodput = goodput


def test_every_round_measures_each_once_and_each_is_first_in_turn(confirmed, landscape):
    found = confirmed([0, 2, 3])
    assert landscape.confirmed == [0, 2, 3, 2, 3, 0, 3, 0, 2]
    assert {number: len(one.metrics["ttft_p95_s"]) for number, one in found.items()} == {
        0: 3,
        2: 3,
        3: 3,
    }


def test_rounds_end_once_a_winner_is_proved(confirmed, landscape):
    reporter = Recorder()
    noisy(landscape, {0: 1.0, 1: 3.0}, 0.02)
    found = confirmed([0, 1], rounds=8, reporter=reporter)
    assert len(found[0].metrics["ttft_p95_s"]) == 3
    assert reporter.notes == [
        "the confirmation ends with round 3: a finalist is above the stock defaults beyond noise"
    ]


class Following(Recorder):
    """Keeps where a confirmation stood."""

    def __init__(self):
        super().__init__()
        self.states = []

    def confirming(self, state):
        self.states.append(state)


def test_where_it_stands_is_told_before_each_measurement_and_at_the_end(confirmed):
    """Five of eight rounds are usual; here three settle it. A trial takes 1 s and not 7 s."""
    reporter = Following()
    confirmed([0, 1], rounds=8, reporter=reporter, trial_s=7.0)
    assert {one.most for one in reporter.states} == {8}
    assert [(one.number, one.left_s) for one in reporter.states] == [
        *[(1, 70.0), (1, 63.0), (1, 56.0)],
        *[(2, 8.0), (2, 7.0), (2, 6.0)],
        *[(3, 6.0), (3, 5.0), (3, 4.0)],
        (3, 0.0),
    ]
    assert reporter.states[0].values == {}
    # Rounds have 1, 1.001 and 1.002 times the goodput of 1.
    assert reporter.states[-1].values == pytest.approx({0: 1.001, 1: 1.001})


def test_who_failed_has_no_figure_to_be_told(confirmed, landscape):
    reporter = Following()
    landscape.goodput = lambda arguments: failed() if arguments.get("n") == 1 else 1.0
    confirmed([0, 1], rounds=2, reporter=reporter)
    assert all(1 not in one.values for one in reporter.states)


def test_what_questions_take_is_told_apart_from_the_rounds(confirmed, landscape):
    def ask(trial, server, measurement, left_s):
        landscape.now_s += 5.0
        return measurement.model_copy(update={"asked_s": 5.0})

    landscape.serve = lambda arguments: "a server"
    reporter = Following()
    confirmed([0, 1], rounds=2, reporter=reporter, trial_s=1.0, afterwards=ask)
    assert [(one.left_s, one.asked_s) for one in reporter.states] == [
        *[(4.0, 0.0), (3.0, 5.0), (2.0, 10.0)],
        *[(2.0, 10.0), (1.0, 15.0), (0.0, 20.0)],
        (0.0, 20.0),
    ]


def test_a_confirmation_without_time_for_more_has_nothing_left(confirmed, landscape):
    reporter = Following()
    # Two trials are measured first, and then two rounds of two.
    confirmed([0, 1], reporter=reporter, trial_s=1.0, until_s=landscape.clock() + 7.0)
    assert (reporter.states[-1].number, reporter.states[-1].left_s) == (2, 0.0)


def test_rounds_end_once_no_gain_that_matters_is_possible(confirmed, landscape):
    reporter = Recorder()
    confirmed([0, 1], rounds=8, reporter=reporter)
    assert landscape.confirmed == [0, 1, 1, 0, 0, 1]
    assert "a gain above 2% over the stock defaults is excluded" in reporter.notes[0]


def test_only_whose_outcome_is_open_goes_on(confirmed, landscape):
    """Trial 2 is so much slower that it cannot win any more after three rounds."""
    noisy(landscape, {0: 1.0, 1: 1.06, 2: 0.4}, 0.05)
    found = confirmed([0, 1, 2], rounds=5)
    assert landscape.confirmed[9:] == [1, 0, 0, 1], "turned on, for two"
    assert {number: len(one.metrics["ttft_p95_s"]) for number, one in found.items()} == {
        0: 5,
        1: 5,
        2: 3,
    }


def test_a_proved_winner_whose_answers_are_judged_later_does_not_end_it(confirmed, landscape):
    noisy(landscape, {0: 1.0, 1: 1.06, 2: 3.0}, 0.05)
    assert len(confirmed([0, 1, 2], rounds=5)[1].metrics["ttft_p95_s"]) == 3
    found = confirmed([0, 1, 2], rounds=5, harmful=[2])
    assert len(found[1].metrics["ttft_p95_s"]) == 5
    assert len(found[2].metrics["ttft_p95_s"]) == 3


def test_who_misses_the_goal_does_not_go_on(confirmed, landscape):
    noisy(landscape, {0: 1.0, 1: 1.06, 2: 1.1}, 0.05)
    landscape.ttft_s = lambda arguments: 1.5 if arguments.get("n") == 2 else 0.5
    found = confirmed([0, 1, 2], rounds=5)
    assert [len(found[n].metrics["ttft_p95_s"]) for n in (0, 1, 2)] == [5, 5, 3]


def test_who_failed_is_not_measured_again(confirmed, landscape):
    noisy(landscape, {0: 1.0, 1: 1.06}, 0.05)
    works = landscape.goodput
    landscape.goodput = lambda arguments: failed() if arguments.get("n") == 2 else works(arguments)
    found = confirmed([0, 1, 2])
    assert landscape.confirmed.count(2) == 1
    assert found[2] == failed()


def test_stock_defaults_go_on_no_longer_than_the_last_finalist(confirmed, landscape):
    landscape.goodput = lambda arguments: failed() if arguments.get("n") else 1.0
    reporter = Recorder()
    confirmed([0, 1, 2], reporter=reporter)
    assert landscape.confirmed == [0, 1, 2]
    assert reporter.notes == ["the confirmation ends with round 1: no finalist is left"]


def test_values_stand_in_the_order_of_the_rounds(confirmed, landscape):
    landscape.goodput = lambda arguments: 1.0 + 1000 * len(landscape.asked)
    found = confirmed([0, 1], rounds=3)
    assert len(found) == 2
    for one in found.values():
        values = one.metrics["goodput_requests_per_s"]
        assert list(values) == sorted(values)


def test_no_round_begins_that_would_end_too_late(confirmed, landscape):
    landscape.trial_s = 10
    reporter = Recorder()
    found = confirmed([0, 1], reporter=reporter, until_s=landscape.now_s + 20 + 55, trial_s=10.0)
    assert landscape.confirmed == [0, 1, 1, 0]
    assert len(found[0].metrics["ttft_p95_s"]) == 2
    assert reporter.notes == ["the time budget is spent after 2 rounds of confirmation"]


def test_without_time_for_one_round_there_is_nothing(confirmed, landscape):
    assert confirmed([0, 1], until_s=landscape.now_s + 1, trial_s=2.5) == {}
    assert landscape.confirmed == []


def test_rounds_that_are_known_need_no_time_and_tell_nothing_of_what_others_take(
    confirmed, landscape, tuning_on
):
    landscape.trial_s = 10
    tuning = tuning_on()
    confirmed([0, 1], rounds=1, tuning=tuning)
    found = confirmed([0, 1], tuning=tuning, until_s=landscape.now_s + 19, trial_s=10.0)
    assert landscape.confirmed == [], "the first round is known, and 19 s hold no other"
    assert len(found[0].metrics["ttft_p95_s"]) == 1
    found = confirmed([0, 1], tuning=tuning, until_s=landscape.now_s + 20, trial_s=10.0)
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
    confirmed([0, 1], rounds=2, until_s=until_s, trial_s=10.0, afterwards=ask)
    assert told == [60.0] * 4, "of 100 s, four measurements take 40"


def test_nobody_to_confirm_is_nothing(landscape, tuning_on):
    assert confirm([], tuning_on().ledger, LOAD, Recorder(), goal=GOAL, rounds=3, seed=0) == {}


def test_stock_defaults_alone_are_not_measured_again(confirmed, landscape):
    assert confirmed([0]) == {}
    assert landscape.asked == []


def told(**rounds):
    """A ledger in which trial n has so many rounds, from the first one on."""
    entries = [
        SimpleNamespace(
            trial=trial(0).model_copy(update={"parent": int(name[1:]), "seed": 1 + turn}),
            measurement=part(goodput=float(turn)),
            rung=RUNG_CONFIRM,
            sitting="today",
        )
        for name, many in rounds.items()
        for turn in range(many)
    ]
    return SimpleNamespace(entries=entries)


def test_an_interrupted_confirmation_counts_the_rounds_that_each_was_in():
    found = confirmed_before(told(t0=5, t1=4, t2=3))
    assert {number: one.metrics["goodput"] for number, one in found.items()} == {
        0: (0.0, 1.0, 2.0, 3.0, 4.0),
        1: (0.0, 1.0, 2.0, 3.0),
        2: (0.0, 1.0, 2.0),
    }


def test_an_interrupted_confirmation_of_too_few_rounds_counts_for_nothing():
    for rounds in ({"t0": 2, "t1": 1}, {"t0": 1, "t1": 2}, {"t1": 3, "t2": 3}, {"t0": 3}, {}):
        assert confirmed_before(told(**rounds)) == {}


def test_who_missed_a_round_counts_up_to_it():
    rounds = told(t0=3, t1=3)
    del rounds.entries[4]  # trial 1 in the second round
    assert confirmed_before(rounds) == {}


def test_what_was_not_measured_beside_the_defaults_is_no_round():
    """Of the second round the defaults were measured anew, before it was interrupted."""
    rounds = told(t0=3, t1=3, t2=3)
    rounds.entries[1].sitting = "tomorrow"
    assert confirmed_before(rounds) == {}
    rounds.entries[4].sitting = "tomorrow"
    assert {n: len(one.metrics["goodput"]) for n, one in confirmed_before(rounds).items()} == {
        0: 3,
        1: 3,
    }


@pytest.fixture
def process(monkeypatch):
    """Gives what follows another process."""

    def begin(name):
        monkeypatch.setattr("kvtune.store.attempts.process_identity", lambda pid: name)

    return begin


def test_rounds_of_which_a_later_process_measured_a_part_are_measured_anew(
    confirmed, landscape, process
):
    process("first")
    confirmed([0, 2])
    process("second")
    confirmed([0, 1])
    assert landscape.confirmed == [0, 1, 1, 0, 0, 1], "stock anew beside another finalist"
    process("third")
    confirmed([0, 2])
    assert landscape.confirmed == [0, 2, 2, 0, 0, 2], "that is back, and its stock is gone"
    process("fourth")
    confirmed([0, 2])
    assert landscape.confirmed == []


def test_a_round_that_was_interrupted_while_it_was_measured_anew_is_no_round(
    confirmed, landscape, process
):
    process("first")
    confirmed([0, 2], rounds=1)
    process("second")
    landscape.interrupt_at = 1
    with pytest.raises(KeyboardInterrupt):
        confirmed([0, 1], rounds=1)
    assert landscape.confirmed == [0]
    landscape.interrupt_at = None
    process("third")
    confirmed([0, 2], rounds=1)
    assert landscape.confirmed == [0, 2]


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


def test_rounds_of_several_loads_count_as_the_smallest_of_them():
    part = Measurement(status=Status.OK, requests_per_repeat=96)
    smaller = part.model_copy(update={"requests_per_repeat": 24})
    assert merged([part, smaller]).requests_per_repeat == 24
    assert merged([part, part]).requests_per_repeat == 96
