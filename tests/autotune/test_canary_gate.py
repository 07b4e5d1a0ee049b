"""A configuration that may change answers is only shipped when somebody vouches for it."""

import pytest
from contracts.landscape import RIGHT, WRONG

from kvtune.autotune.canary_gate import Canary
from kvtune.types import Choice, Harm, Measurement, PolicyStack, Status


def stack(harm):
    choice = Choice(policy="p", parameters={}, arguments={"a": 1}, harm=harm)
    return PolicyStack(choices=(choice,))


def measured(answers):
    return Measurement(status=Status.OK, canary_answers=answers)


def objection(ours, stock, harm=Harm.NEAR_LOSSLESS):
    return Canary(None if stock == "none" else measured(stock)).objection(
        stack(harm), measured(ours)
    )


def test_answers_as_right_as_the_defaults_are_no_objection():
    assert objection(RIGHT, RIGHT) is None


def test_a_lossless_configuration_needs_no_canary():
    assert objection(WRONG, RIGHT, Harm.LOSSLESS) is None
    assert objection(None, None, Harm.LOSSLESS) is None
    assert Canary(measured(RIGHT)).objection(PolicyStack(), measured(None)) is None


@pytest.mark.parametrize("harm", [Harm.NEAR_LOSSLESS, Harm.LOSSY])
def test_a_fact_that_is_lost_is_an_objection_that_shows_both_answers(harm):
    said = objection((WRONG[0], *RIGHT[1:]), RIGHT, harm)
    assert "'7194'" in said
    assert WRONG[0] in said


@pytest.mark.parametrize(("ours", "stock"), [(None, RIGHT), (RIGHT, None), (RIGHT, "none")])
def test_answers_that_are_missing_vouch_for_nothing(ours, stock):
    assert "nothing to compare" in objection(ours, stock)


def test_a_model_that_cannot_answer_vouches_for_nothing():
    assert "cannot vouch" in objection(RIGHT, WRONG)
