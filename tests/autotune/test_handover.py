"""From a study to a serving config: provenance, warnings and the way back."""

import pytest
from contracts.landscape import RIGHT, failed
from contracts.store_values import a_quality_report

from kvtune.autotune.handover import serving_config
from kvtune.autotune.quality.words import summary
from kvtune.autotune.tune import Budget
from kvtune.errors import NotFound
from kvtune.types import Choice, Decision, FailureClass, Harm, Outcome, PolicyStack

BASE = {"max-model-len": 2048, "block-size": 64}


def stack(harm=Harm.LOSSLESS, because="fewer wasted tokens", **arguments):
    choice = Choice(policy="p", parameters={}, arguments=arguments, harm=harm, because=because)
    return PolicyStack(choices=(choice,))


@pytest.fixture
def study(tuning_on, landscape, store):
    """A study with the defaults as trial 0 and `settings` as trial 1, and this decision."""
    landscape.canary = lambda arguments: RIGHT

    def make(settings, outcome=None, reasons=(), recommended=1, environment=None):
        tuning = tuning_on(base=BASE, budget=Budget(trials=2), environment=environment)
        for each in (PolicyStack(), settings):
            tuning.ledger.run(each, tuning.tuning_set, repeats=1, seed=0, rung=1, canary=True)
        if outcome is not None:
            decision = Decision(
                outcome=outcome, recommended=recommended, baseline=0, reasons=reasons
            )
            store.save_decision(tuning.study, decision)
        return tuning.study

    return make


def test_every_setting_says_where_it_comes_from(study, store):
    settings = stack(**{"block-size": 32, "watermark": 0.1})
    config = serving_config(store, study(settings, Outcome.WINNER))
    said = {one.name: (one.value, one.origin, one.because) for one in config.settings}
    assert said == {
        "block-size": (32, "tuned", "fewer wasted tokens"),
        "watermark": (0.1, "tuned", "fewer wasted tokens"),
        "max-model-len": (2048, "base", "given for every trial"),
    }, "what is tuned replaces what was given"


def test_the_way_back_are_the_arguments_from_before(study, store):
    config = serving_config(store, study(stack(watermark=0.1), Outcome.WINNER))
    assert config.revert_arguments == BASE


def test_a_clear_winner_needs_no_warning(study, store):
    config = serving_config(store, study(stack(watermark=0.1), Outcome.WINNER))
    assert config.outcome is Outcome.WINNER
    assert config.warnings == ()


@pytest.mark.parametrize(
    "outcome", [Outcome.INFEASIBLE, Outcome.NO_CLEAR_WINNER, Outcome.KEEP_BASELINE]
)
def test_what_is_no_clear_winner_carries_the_reasons(outcome, study, store):
    settings = stack(watermark=0.1)
    config = serving_config(store, study(settings, outcome, reasons=("p95 ttft is missed",)))
    assert config.outcome is outcome
    assert "p95 ttft is missed" in config.warnings


def test_a_winner_that_was_not_confirmed_says_so(study, store):
    reasons = ("goodput is above", "nothing was confirmed")
    config = serving_config(store, study(stack(watermark=0.1), Outcome.WINNER, reasons=reasons))
    assert config.warnings == ("nothing was confirmed",)


def test_settings_that_may_change_answers_say_what_was_checked(study, store):
    settings = stack(Harm.NEAR_LOSSLESS, **{"kv-cache-dtype": "fp8"})
    (warning,) = serving_config(store, study(settings, Outcome.WINNER)).warnings
    assert "near-lossless: answers can differ from stock" in warning
    assert "checked by the long-prompt canary and on its own traffic only" in warning


def test_what_is_known_of_answers_is_said_once(study, store):
    said = summary(a_quality_report())
    row = study(stack(Harm.NEAR_LOSSLESS, a=1), Outcome.NO_CLEAR_WINNER, reasons=(said, "a tie"))
    store.save_quality_report(a_quality_report(), study=row, trial=1)
    warnings = serving_config(store, row).warnings
    assert [said in warning for warning in warnings].count(True) == 1
    assert "a tie" in warnings


def test_a_trial_that_a_person_picks_is_no_recommendation(study, store):
    row = study(stack(watermark=0.1), Outcome.WINNER)
    config = serving_config(store, row, 0)
    assert config.outcome is None
    assert config.trial == 0
    assert [one.name for one in config.settings] == list(BASE)
    assert "this trial is not the one that the study recommends" in config.warnings
    assert config.figures["ttft_p95_s"].repeats == 1


def test_a_trial_without_figures_says_that_nothing_is_known(study, store, landscape):
    landscape.goodput = lambda arguments: failed(FailureClass.DOES_NOT_FIT, "too small")
    config = serving_config(store, study(stack(watermark=0.1), Outcome.WINNER, recommended=0), 1)
    assert "nothing is known about how it serves" in " ".join(config.warnings)
    assert config.figures == {}


def test_the_figures_are_those_of_the_decision(tuning_on, landscape, store):
    landscape.goodput = lambda arguments: 1.0 + len(arguments)
    tuning = tuning_on(budget=Budget(trials=3, finalists=1), max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    config = serving_config(store, tuning.study)
    assert config.trial == decision.recommended
    assert config.figures == decision.figures
    assert config.baseline_figures == decision.baseline_figures
    assert config.figures["ttft_p95_s"].repeats == 3


@pytest.mark.parametrize("outcome", [None, Outcome.NOTHING_MEASURED])
def test_a_study_that_recommends_nothing_has_nothing_to_hand_over(outcome, study, store):
    row = study(stack(watermark=0.1), outcome, recommended=None)
    with pytest.raises(NotFound, match="recommends nothing yet"):
        serving_config(store, row)


def test_a_trial_that_is_not_there_is_not_found(study, store):
    with pytest.raises(NotFound, match="has no trial 7"):
        serving_config(store, study(stack(watermark=0.1), Outcome.WINNER), 7)


def test_only_the_environment_that_the_user_asked_for_is_handed_over(study, store):
    """What kvtune sets to measure well stays with the measurement."""
    row = study(stack(watermark=0.1), Outcome.WINNER, environment={"HF_HUB_OFFLINE": "1"})
    assert serving_config(store, row).environment == {"HF_HUB_OFFLINE": "1"}
