"""Who is confirmed, who is out, and in which order."""

import pytest

from kvtune.autotune.ledger import Entry
from kvtune.autotune.standing import finalists, ranked, rejected
from kvtune.types import (
    Choice,
    Failure,
    FailureClass,
    Goal,
    Harm,
    Measurement,
    OutputHealth,
    PolicyStack,
    Slo,
    Status,
    Trial,
)

GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
DEAD = Measurement(
    status=Status.FAILED,
    failure=Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it died"),
)


class Nothing:
    """Gates through which everybody gets but those that are named."""

    def __init__(self, against=(), unproved=(), left_out=()):
        self._against, self._unproved, self._left_out = against, unproved, left_out

    def objection(self, entry):
        return "against" if entry.trial.number in self._against else None

    def left_out(self, entry):
        return "no time" if entry.trial.number in self._left_out else None

    def unproved(self, entry):
        return "unproved" if entry.trial.number in self._unproved else None


def measured(goodput, ttft_s=0.5):
    metrics = {"goodput_requests_per_s": (goodput,), "ttft_p95_s": (ttft_s,)}
    return Measurement(status=Status.OK, metrics=metrics)


def entry(number, measurement, harm=Harm.LOSSLESS):
    choice = Choice(policy="p", parameters={}, arguments={"a": number}, harm=harm)
    stack = PolicyStack(choices=(choice,) if number else ())
    trial = Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)
    return Entry(trial, measurement, reused=True)


def lossy(number, measurement):
    return entry(number, measurement, Harm.NEAR_LOSSLESS)


STOCK = entry(0, measured(1.0))


def numbers(entries):
    return [one.trial.number for one in entries]


def test_those_that_meet_the_goal_come_first_then_the_better_ones():
    points = [STOCK, entry(1, measured(9.0, ttft_s=2.0)), entry(2, measured(2.0))]
    points += [entry(3, measured(3.0)), entry(4, DEAD), entry(5, measured(7.0))]
    assert numbers(ranked(GOAL, points, Nothing(against=(5,)))) == [3, 2, 1]


def test_where_nothing_meets_the_goal_the_closest_to_it_come_first():
    points = [STOCK, entry(1, measured(9.0, ttft_s=4.0)), entry(2, measured(1.0, ttft_s=1.1))]
    unknown = measured(5.0).model_copy(update={"metrics": {"goodput_requests_per_s": (5.0,)}})
    points += [entry(3, measured(2.0, ttft_s=1.5)), entry(4, unknown)]
    assert numbers(ranked(GOAL, points, Nothing())) == [2, 3, 1, 4]
    assert numbers(finalists(GOAL, points, Nothing(), 2)) == [2, 3]


def test_the_best_are_confirmed():
    points = [STOCK, *(entry(number, measured(float(number))) for number in range(1, 6))]
    assert numbers(finalists(GOAL, points, Nothing(), 2)) == [5, 4]
    assert numbers(finalists(GOAL, points, Nothing(), 9)) == [5, 4, 3, 2, 1]


def test_one_place_is_for_a_lossless_trial_that_meets_the_goal():
    points = [STOCK, entry(1, measured(2.0)), entry(2, measured(3.0))]
    points += [lossy(number, measured(float(number))) for number in (7, 8, 9)]
    assert numbers(finalists(GOAL, points, Nothing(), 3)) == [9, 8, 2]
    assert numbers(finalists(GOAL, points, Nothing(), 1)) == [9], "there is one place only"
    slow = [STOCK, entry(1, measured(2.0, ttft_s=2.0)), *points[3:]]
    assert numbers(finalists(GOAL, slow, Nothing(), 3)) == [9, 8, 7], "it could not win"


def test_a_search_that_ended_has_more_reasons_than_one_that_runs():
    points = [STOCK, entry(1, measured(2.0)), entry(2, measured(3.0)), entry(3, DEAD)]
    gates = Nothing(against=(1,), unproved=(2,))
    crashed = "crash-under-load: it died"
    assert rejected(points, gates) == {1: "against", 3: crashed}
    assert rejected(points, gates, {}) == {1: "against", 2: "unproved", 3: crashed}
    confirmed = {0: measured(1.0), 2: measured(3.0)}
    assert rejected(points, gates, confirmed) == {1: "against", 2: "unproved", 3: crashed}


@pytest.mark.parametrize(
    ("last", "reason"), [(DEAD, "crash-under-load: it died"), (None, "not among")]
)
def test_the_confirmation_has_the_last_word(last, reason):
    confirmed = {0: measured(1.0)} | ({} if last is None else {1: last})
    found = rejected([STOCK, entry(1, measured(2.0))], Nothing(), confirmed)
    assert found[1].startswith(reason)


def test_what_would_have_been_confirmed_says_why_it_was_not():
    points = [STOCK, entry(1, measured(2.0)), entry(2, measured(3.0))]
    found = rejected(points, Nothing(left_out=(2,)), {0: measured(1.0), 1: measured(2.0)})
    assert found == {2: "no time"}


def test_broken_answers_to_held_out_requests_are_out_though_those_of_the_search_were_sane():
    def answered(looping):
        outputs = OutputHealth(answers=64, text_prompts=64, long_prompts=64, looping=looping)
        return measured(3.0).model_copy(update={"outputs": outputs})

    points = [entry(0, answered(0)), entry(1, answered(0)), entry(2, answered(0))]
    confirmed = {0: answered(1), 1: answered(40), 2: answered(2)}
    (said,) = rejected(points, Nothing(), confirmed).items()
    assert said[0] == 1
    assert said[1].startswith("at the confirmation, 40 of 64 answers")
    assert rejected(points, Nothing()) == {}
    alone = {1: answered(40), 2: answered(2)}
    assert set(rejected(points, Nothing(), alone)) == {0}, "there is no baseline beside it"
