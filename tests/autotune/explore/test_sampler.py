"""Who proposes, and that a reader is told so."""

from dataclasses import replace

import pytest
from contracts.landscape import GOAL
from contracts.surfaces import CTX

from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.explore.sampler import proposer_by, proposer_text
from kvtune.autotune.limits import Budget, Rules, Sampler

TPE = "trials are proposed by Optuna's TPE sampler, "
MODEL = "trials are proposed by the search's model, "


def told(rules):
    proposer = proposer_by(rules, None, GOAL, CTX)
    return proposer, proposer_text(rules, None, proposer)


def test_a_sampler_that_was_asked_for_is_named_with_what_it_cannot_say():
    proposer, said = told(Rules(sampler=Sampler.TPE))
    assert proposer is None
    assert said.startswith(f"{TPE}as it was asked for")
    assert "no estimate of how far" in said


def test_a_space_too_large_for_a_model_without_simulations_is_no_silent_change(monkeypatch):
    monkeypatch.setattr("kvtune.autotune.explore.sampler.LARGE", 10**9)
    proposer, said = told(Rules())
    assert isinstance(proposer, ModelProposer)
    assert said == f"{MODEL}without simulations of this load"
    monkeypatch.setattr("kvtune.autotune.explore.sampler.LARGE", 100)
    proposer, said = told(Rules())
    assert proposer is None
    assert said.startswith(f"{TPE}as the space has more than 100 configurations")
    assert told(replace(Rules(), sampler=Sampler.MODEL))[1].startswith(MODEL)


@pytest.mark.parametrize("sampler", [Sampler.TPE, Sampler.AUTO])
def test_a_search_keeps_with_its_study_who_proposed(sampler, tuning_on, landscape):
    tuning = tuning_on(sampler=sampler)
    tuning.run()
    said = [row.says for row in tuning.store.steps(tuning.study) if row.step == "note"]
    assert [one.startswith(TPE) for one in said if "are proposed by" in one] == [
        sampler is Sampler.TPE
    ]


@pytest.mark.parametrize(("enough", "trials"), [(0.9, 8), (0.0, 12)])
def test_a_search_ends_where_no_more_is_missing_than_its_rules_allow(
    enough, trials, tuning_on, landscape
):
    tuning = tuning_on(budget=Budget(trials=12), enough=enough, sampler=Sampler.MODEL)
    tuning.run()
    assert len(tuning.so_far.tried) == trials
