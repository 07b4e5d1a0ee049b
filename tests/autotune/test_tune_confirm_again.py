"""What a search does whose finalists all miss the goal on requests that it has not seen."""

import pytest
from contracts.landscape import ONLY_BLOCK_SIZE

from kvtune.autotune.explore.measuring import REPEAT_SEED
from kvtune.autotune.limits import Budget, Sampler
from kvtune.types import Harm, Outcome

BUDGET = Budget(trials=7, confirm_rounds=3)
"""Four lossless points, and three trials more."""


def is_fp8(arguments):
    return "kv-cache-dtype" in arguments


@pytest.fixture
def search(tuning_on, landscape):
    """A search in which blocks of 32 meet the goal, but not when they are confirmed; fp8 does."""
    real = landscape.run_trial
    landscape.searched_s = {"lossless": {32: 0.97}, "fp8": {}}
    landscape.heldout_s = {"lossless": {}, "fp8": {None: 0.3}}

    def run_trial(trial, *args, **options):
        is_final = trial.parent is not None and trial.seed < REPEAT_SEED
        harm = "fp8" if is_fp8(trial.arguments) else "lossless"
        own = (landscape.heldout_s if is_final else landscape.searched_s)[harm]
        usual = 0.3 if harm == "fp8" and not is_final else 1.2
        found = own.get(trial.arguments.get("block-size"), own.get(None, usual))
        landscape.ttft_s = lambda arguments: found
        return real(trial, *args, **options)

    landscape.run_trial = run_trial
    return lambda **changed: tuning_on(
        **{"base": ONLY_BLOCK_SIZE, "budget": BUDGET, "sampler": Sampler.TPE, **changed}
    )


def steps(tuning, kind):
    return [row.says for row in tuning.store.steps(tuning.study) if row.step == kind]


def turns(landscape):
    """The seeds of each confirmation, from those of its first round on."""
    return sorted({one.trial.seed for one in landscape.asked if one.trial.parent is not None})


def test_the_next_rung_opens_and_what_it_finds_is_confirmed(search, landscape):
    tuning = search()
    decision = tuning.run()
    assert decision.outcome is Outcome.NO_CLEAR_WINNER, "goodput is the same"
    chosen = tuning.store.trial(tuning.study, decision.recommended).trial
    assert chosen.stack.harm is Harm.NEAR_LOSSLESS
    assert len(tuning.so_far.tried) <= BUDGET.trials
    (said,) = steps(tuning, "unlock")
    assert "those that met the goal in the search missed it when they were confirmed" in said
    assert turns(landscape) == [1, 2, 3, 101, 102, 103], "other prompts than the first ones"


def test_who_missed_it_is_out_for_that(search, landscape):
    tuning = search()
    decision = tuning.run()
    first = {
        one.trial.parent for one in landscape.asked if one.trial.parent and one.trial.seed <= 3
    }
    assert len(first) == BUDGET.finalists
    assert {decision.rejected[number] for number in first} == {
        "when it was confirmed, p95 ttft <= 1s was missed: measured 1.2 s"
    }
    assert "not among those that were confirmed" in decision.rejected.values()


def test_the_same_command_again_measures_nothing_and_decides_the_same(search, landscape):
    first = search().run()
    asked = len(landscape.asked)
    assert search().run() == first
    assert len(landscape.asked) == asked


@pytest.mark.parametrize("later", [-1, 1, 5, 9])
def test_an_interrupted_search_comes_to_the_same_end(later, search, landscape):
    whole = search().run()
    known = [one.trial for one in landscape.asked]
    first = next(at for at, one in enumerate(known) if is_fp8(one.arguments))
    landscape.asked.clear()
    landscape.interrupt_at = first + later
    stopped = search(name="again", remeasure=True)
    stopped.run()
    assert stopped.interrupted
    landscape.interrupt_at = None
    onward = search(name="again")
    decision = onward.run()
    assert decision.outcome is whole.outcome
    chosen = onward.store.trial(onward.study, decision.recommended).trial
    assert chosen.stack.harm is Harm.NEAR_LOSSLESS
    numbers = [(one.trial.parent, one.trial.seed) for one in landscape.asked]
    confirmed = [one for one in numbers if one[0] == 0]
    assert sorted({seed for _, seed in confirmed}) == [1, 2, 3, 101, 102, 103]


def test_without_budget_the_decision_says_what_was_not_tried(search, landscape):
    tuning = search(budget=Budget(trials=4, confirm_rounds=3))
    decision = tuning.run()
    assert decision.outcome is Outcome.INFEASIBLE
    assert not any(map(is_fp8, landscape.points))
    assert any(
        why.startswith("near-lossless settings were not tried: lossless trials met the goal")
        for why in decision.reasons
    )
    assert search(budget=Budget(trials=4, confirm_rounds=3)).run() == decision
    onward = search()
    chosen = onward.store.trial(onward.study, onward.run().recommended).trial
    assert chosen.stack.harm is Harm.NEAR_LOSSLESS, "a larger budget goes on there"


def test_where_nothing_passes_at_all_the_closest_is_named_once_everything_was_tried(
    search, landscape
):
    landscape.heldout_s = {"lossless": {}, "fp8": {None: 1.5}}
    tuning = search()
    decision = tuning.run()
    assert decision.outcome is Outcome.INFEASIBLE
    assert turns(landscape) == [1, 2, 3, 101, 102, 103]
    chosen = tuning.store.trial(tuning.study, decision.recommended).trial
    assert chosen.stack.harm is Harm.LOSSLESS, "1.2 s are closer than 1.5 s"
    assert not any("were not tried" in why for why in decision.reasons)
    assert search().run() == decision


def test_trials_with_more_room_are_confirmed_before_harm_is_tried(search, landscape):
    landscape.searched_s["lossless"] = {32: 0.97, 64: 0.7, 256: 0.9}
    landscape.heldout_s["lossless"] = {64: 0.9}
    landscape.goodput = lambda arguments: 2.0 if arguments.get("block-size") == 32 else 1.0
    tuning = search(budget=Budget(trials=7, finalists=1, confirm_rounds=3))
    decision = tuning.run()
    assert not any(map(is_fp8, landscape.points))
    chosen = tuning.store.trial(tuning.study, decision.recommended).trial
    assert chosen.stack.arguments == {"block-size": 64}
    parents = [one.trial.parent for one in landscape.asked if one.trial.parent]
    assert len(set(parents)) == 2, "1.2 / 0.97 of 0.9 s is too much too"
