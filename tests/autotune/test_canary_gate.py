"""A configuration that may change answers is only shipped when somebody vouches for it."""

import pytest
from contracts.landscape import RIGHT, WRONG

from kvtune.autotune.canary_gate import Canary
from kvtune.types import Choice, EffectiveConfig, Harm, Measurement, PolicyStack, Status


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


@pytest.mark.parametrize(
    ("part", "may_forget"),
    [
        ("streaming_llm.window_tokens", True),
        ("page_eviction.budget_tokens", True),
        ("quest.budget_tokens", True),
        ("tiers.host_bytes", False),
    ],
)
def test_what_leaves_a_part_of_the_context_out_may_forget_and_not_break(part, may_forget):
    arguments = {f"additional-config.kvtune.{part}": 256}
    choice = Choice(policy="p", parameters={}, arguments=arguments, harm=Harm.LOSSY)
    asked = PolicyStack(choices=(choice,))
    canary = Canary(measured(RIGHT))
    forgot = canary.objection(asked, measured(("the number is not known",) * 3))
    assert (forgot is None) is may_forget
    assert canary.objection(asked, measured(("",) * 3)) is not None


def test_answers_are_held_against_the_facts_of_the_prompts_that_fitted():
    def short(*answers):
        effective = EffectiveConfig(max_model_len_tokens=512)
        return measured(answers).model_copy(update={"effective": effective})

    canary = Canary(short("2956 stones"))
    assert canary.objection(stack(Harm.LOSSY), short("2956 stones")) is None
    assert "'2956'" in canary.objection(stack(Harm.LOSSY), short("7194 stones"))


def test_where_no_prompt_fits_that_is_what_is_said():
    tiny = measured(()).model_copy(update={"effective": EffectiveConfig(max_model_len_tokens=64)})
    assert Canary(tiny).objection(stack(Harm.LOSSY), tiny).startswith("no canary prompt fits")


def test_a_window_that_holds_a_whole_prompt_may_forget_nothing_of_it():
    arguments = {"additional-config.kvtune.streaming_llm.window_tokens": 4096}
    choice = Choice(policy="p", parameters={}, arguments=arguments, harm=Harm.LOSSY)
    said = Canary(measured(RIGHT)).objection(
        PolicyStack(choices=(choice,)), measured(("the number is not known",) * 3)
    )
    assert "'7194'" in said
