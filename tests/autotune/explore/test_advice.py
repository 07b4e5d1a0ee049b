"""What a proposer is told of trials: their figures, what failed, and whose answers are broken."""

import pytest
from contracts.landscape import failed
from contracts.studies import measured, stack

from kvtune.autotune.explore.advice import Advice, observations
from kvtune.autotune.explore.base import Observation
from kvtune.autotune.explore.kin import Kin
from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.types import FailureClass, Status, Trial


class Gates:
    """Objects to one trial."""

    def objection(self, entry):
        return "it answers garbage" if entry.trial.number == 1 else None


class SoFar:
    """Trials of a search without an end."""

    also = ()

    def __init__(self, *entries):
        self.tried, self.gates, self.budget = list(entries), Gates(), Budget(trials=9)

    @property
    def points(self):
        return self.tried

    def left_s(self):
        return 100.0


class Listening:
    def __init__(self):
        self.seen, self.left = [], None

    def observe(self, observation):
        self.seen.append(observation)

    def pick(self, space, ctx, *, seconds_left, trials_left):
        self.left = seconds_left, trials_left


def entry(number, found, arguments=None, parent=None):
    trial = Trial(
        number=number,
        stack=stack(arguments or {}),
        base_arguments={"a": 1},
        repeats=1,
        seed=0,
        parent=parent,
    )
    return Entry(trial, found, reused=False)


GOOD = measured(2.0).model_copy(update={"wall_s": 30.0, "asked_s": 10.0, "stop_s": 1.0})


def test_figures_are_means_and_times_leave_out_questions():
    both = GOOD.model_copy(update={"metrics": {"ttft_p95_s": (0.1, 0.3)}})
    first, second = observations([entry(0, GOOD), entry(2, both, {"b": 2})], Gates())
    assert (first.at_s, first.wall_s) == (0.0, 21.0)
    assert (second.at_s, second.wall_s) == (21.0, 21.0)
    assert second.figures == {"ttft_p95_s": pytest.approx(0.2)}
    assert second.arguments == {"b": 2}, "without those that every trial has"


def test_answers_that_may_not_be_shipped_are_a_failure_of_the_point():
    first, repeat = observations([entry(1, GOOD), entry(3, GOOD, parent=1)], Gates())
    assert first.failure is FailureClass.BROKEN_OUTPUT
    assert first.figures == {}
    assert repeat.failure is None, "a repeat is not asked"


def test_a_trial_that_was_cut_counts_by_its_share():
    cut = GOOD.model_copy(update={"status": Status.CUT, "share": 0.4, "cut": "behind"})
    (found,) = observations([entry(2, cut)], Gates())
    assert found.share == 0.4
    assert found.failure is None
    assert found.figures


def test_what_kin_failed_at_is_told_after_the_baseline_if_it_is_of_the_point():
    proposer = Listening()
    lost = [
        Observation({"b": number}, {}, 0.0, 1.0, failure=failure, task=0.8)
        for number, failure in enumerate(
            (FailureClass.DOES_NOT_FIT, FailureClass.CONTAMINATED, FailureClass.PORT_TAKEN)
        )
    ]
    so_far = SoFar(entry(0, GOOD))
    advice = Advice(proposer, so_far, None, [Kin(None, 0.8, (), tuple(lost))])
    assert advice.pick(None) is None
    so_far.tried.append(entry(2, failed(), {"b": 2}))
    advice.pick(None)
    assert [(one.arguments, one.failure) for one in proposer.seen] == [
        ({}, None),
        ({"b": 0}, FailureClass.DOES_NOT_FIT),
        ({"b": 2}, FailureClass.CRASH_UNDER_LOAD),
    ]
    advice.end()


def test_time_for_the_confirmation_is_not_time_for_trials():
    proposer = Listening()
    advice = Advice(proposer, SoFar(entry(0, GOOD), entry(2, GOOD)), None, ())
    advice.pick(None)
    seconds, trials = proposer.left
    # Three rounds of two finalists and the defaults, 20 s each, are more than there is.
    assert seconds == 0.0
    assert trials == 7
    advice.end()


def test_without_a_model_nothing_is_said():
    advice = Advice(None, SoFar(entry(0, GOOD)), None, ())
    assert not advice.is_given
    assert advice.stop(None) == ""
    assert advice.chance(None) == 1.0
    assert advice.left_out(None) == ""
    assert advice.regret({}, None) is None
    advice.end()
