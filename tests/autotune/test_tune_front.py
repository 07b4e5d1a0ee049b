"""A search for more than one objective: what it measures, confirms, and keeps as its front."""

import json

import optuna
import pytest
from contracts.landscape import ONLY_BLOCK_SIZE
from contracts.questions import ONLY_KV_DTYPE, Words, is_harmful

from kvtune.autotune.limits import Also, Budget, Sampler
from kvtune.profilers.quality.suite import QualityMetric
from kvtune.types import EffectiveConfig, Harm, Outcome

GOODPUT = {32: 1.0, 64: 1.8, 128: 2.0, 256: 1.5}
"""By block size; the pool takes as many MiB. 64 lies between the ends, and 128 beats 256."""

MIB = 1 << 20


def block_size(arguments):
    return arguments.get("block-size", 128)


@pytest.fixture
def blocks(landscape):
    """Larger blocks need more memory, and up to the defaults they are faster."""
    landscape.goodput = lambda arguments: GOODPUT[block_size(arguments)]
    landscape.effective = lambda arguments: EffectiveConfig(
        kv_cache_memory_bytes=block_size(arguments) * MIB
    )
    return landscape


@pytest.fixture
def front_search(tuning_on):
    """Makes a search that wants little memory too."""

    def make(**changed):
        usual = {
            "base": ONLY_BLOCK_SIZE,
            "max_harm": Harm.LOSSLESS,
            "also": (Also.MEMORY,),
            "budget": Budget(trials=8, finalists=2, confirm_rounds=2),
        }
        return tuning_on(**{**usual, **changed})

    return make


def sizes(tuning, numbers):
    """The block sizes of these trials."""
    stacks = {e.trial.number: e.trial.stack for e in tuning.ledger.entries}
    return [block_size(stacks[number].arguments) for number in numbers]


def on_front(tuning, decision):
    return sizes(tuning, [point.trial for point in decision.front.points])


@pytest.mark.parametrize("sampler", [Sampler.MODEL, Sampler.TPE])
def test_the_front_is_kept_with_the_decision(sampler, front_search, blocks, store):
    tuning = front_search(sampler=sampler)
    decision = tuning.run()
    front = decision.front
    assert on_front(tuning, decision) == [128, 64, 32]
    assert sizes(tuning, front.ends.values()) == [128, 32]
    assert sizes(tuning, [front.knee]) == [64]
    assert sizes(tuning, front.beaten) == [256]
    assert store.decision(tuning.study) == decision


def test_the_recommendation_is_by_the_goals_own_objective(front_search, blocks):
    decision = front_search().run()
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert decision.recommended == 0


def test_the_ends_of_the_front_are_confirmed_and_then_its_knee(front_search, blocks):
    """The defaults are an end, and are confirmed in any case."""
    for finalists, expected in ((1, {128, 32}), (2, {128, 32, 64})):
        tuning = front_search(
            budget=Budget(trials=8, finalists=finalists, confirm_rounds=2),
            name=f"with {finalists}",
        )
        decision = tuning.run()
        told = [point.trial for point in decision.front.points if point.confirmed is not None]
        assert {*sizes(tuning, told)} == expected


def test_without_further_objectives_there_is_no_front(front_search, blocks, optuna_tables):
    tuning = front_search(also=())
    assert tuning.run().front is None
    assert optuna.get_all_study_names(tuning.store.url) == [tuning.study.name]


@pytest.mark.parametrize("sampler", [Sampler.MODEL, Sampler.TPE])
def test_optuna_keeps_all_objectives_of_each_trial(sampler, front_search, blocks, optuna_tables):
    tuning = front_search(sampler=sampler)
    tuning.run()
    study = optuna.load_study(
        study_name=f"{tuning.study.name}-front-memory", storage=tuning.store.url
    )
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    best = {
        (round(goodput, 2), memory) for goodput, memory in (one.values for one in study.best_trials)
    }
    assert best == {(GOODPUT[size], size * MIB) for size in (32, 64, 128)}


def test_a_search_that_goes_on_measures_nothing_twice_and_ends_with_the_same_front(
    front_search, blocks
):
    first = front_search(budget=Budget(trials=2, finalists=2, confirm_rounds=2))
    first.run()
    again = front_search()
    decision = again.run()
    seen = [json.dumps(arguments, sort_keys=True) for arguments in blocks.points]
    assert len(seen) == len(set(seen)) == 4
    assert on_front(again, decision) == [128, 64, 32]


def test_another_objective_is_asked_of_what_was_measured_for_the_first(front_search, blocks):
    front_search(also=()).run()
    measured = len(blocks.points)
    tuning = front_search()
    decision = tuning.run()
    assert len(blocks.points) == measured == 4
    assert on_front(tuning, decision) == [128, 64, 32]


def test_a_trial_that_is_hopeless_by_the_goals_objective_is_not_given_up(front_search, blocks):
    assert front_search().ledger.watch is None
    assert front_search(also=(), name="other").ledger.watch is not None


class Drift(Words):
    """What is said is by how much an answer diverges."""

    name = "fidelity"
    metrics = (QualityMetric("kl", "nats", "lower", "level", 0.02, bounds=None, spread=0.001),)

    def figures(self, item, ours, theirs):
        return {"kl": (float(ours.texts[0]) - float(theirs.texts[0]), 0.0)}


def test_quality_is_how_far_answers_diverge_and_lossless_settings_do_not(
    questioned_search, questioned, monkeypatch
):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Drift(),))
    questioned.say = lambda arguments, item: "0.004" if is_harmful(arguments) else "0"
    tuning = questioned_search(
        base=ONLY_KV_DTYPE, also=(Also.QUALITY,), explore_lossy=True, max_harm=Harm.NEAR_LOSSLESS
    )
    decision = tuning.run()
    lossy, stock = decision.front.points[-2:]
    assert (lossy.figures["quality"].estimate, stock.figures["quality"].estimate) == (
        pytest.approx(0.004),
        0.0,
    )
    assert stock.trial == 0
    assert decision.front.ends == {"goodput": decision.front.points[0].trial, "quality": 0}
