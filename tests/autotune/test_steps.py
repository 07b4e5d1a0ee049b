"""What a search said stays with its study."""

import optuna
import pytest
from contracts.landscape import ONLY_BLOCK_SIZE

from kvtune.autotune.report.study_trail import trail
from kvtune.autotune.report.study_view import study_view
from kvtune.autotune.rounds import Confirming
from kvtune.autotune.steps import KeepsSteps
from kvtune.autotune.tune import Budget
from kvtune.types import Bottleneck, Harm, Verdict

BUDGET = Budget(trials=5, finalists=1, confirm_rounds=2)


@pytest.fixture
def keeper(tuning_on, landscape):
    tuning = tuning_on()
    return KeepsSteps(tuning.reporter, tuning.store, tuning.study)


def kept(keeper):
    return [(row.step, row.says, row.trial) for row in keeper._store.steps(keeper._study)]


def test_notes_steps_and_the_verdict_are_kept_and_passed_on(keeper):
    keeper.phase("Measuring")
    keeper.note("a remark")
    keeper.step("stop", "the end", trial=3)
    keeper.verdict(
        Verdict(
            bottleneck=Bottleneck.KV_CAPACITY,
            confidence="high",
            evidence=(),
            summary="the pool is full",
        )
    )
    assert kept(keeper) == [
        ("note", "a remark", None),
        ("stop", "the end", 3),
        ("verdict", "bound by kv-capacity (high confidence): the pool is full", None),
    ]
    assert keeper._reporter.notes == ["a remark", "the end"]


def test_where_a_confirmation_stands_is_passed_on_and_not_kept(keeper):
    told = []
    keeper._reporter.confirming = told.append
    state = Confirming(1, 8, {0: 2.0}, left_s=9.0)
    keeper.confirming(state)
    assert told == [state]
    assert kept(keeper) == []


def test_what_was_said_before_is_kept_once(keeper):
    keeper.note("a remark")
    keeper.note("a remark")
    again = KeepsSteps(keeper._reporter, keeper._store, keeper._study)
    again.note("a remark")
    again.step("stop", "a remark")
    assert [step for step, _, _ in kept(keeper)] == ["note", "stop"]
    assert len(keeper._reporter.notes) == 4


def test_the_trail_of_a_search_tells_its_rungs_why_they_opened_and_why_it_ended(
    tuning_on, landscape
):
    """The goal is missed by everything, so that 8-bit formats are unlocked after 3 of 5 trials."""
    landscape.ttft_s = lambda arguments: 2.0
    tuning = tuning_on(budget=BUDGET, base=ONLY_BLOCK_SIZE, max_harm=Harm.NEAR_LOSSLESS)
    tuning.run()
    view = study_view(tuning.store, tuning.study)
    steps = trail(view)
    assert [(s.kind, s.trial, s.rung) for s in steps if s.kind in ("rung", "unlock", "stop")] == [
        ("rung", None, ""),
        ("rung", None, ""),
        ("unlock", 3, "L2"),
        ("stop", None, ""),
    ]
    says = {step.kind: step.says for step in steps}
    rungs = [step.says for step in steps if step.kind == "rung"]
    assert rungs[0].startswith("L1, lossless settings, tried together: block_size; not tried, ")
    assert "watermark: watermark is fixed by --engine-args" in rungs[0]
    assert rungs[1].startswith(
        "L2, near-lossless settings, tried if the goal is missed: kv_cache_dtype; not tried, "
    )
    assert says["unlock"].endswith(
        "the lossless share of the budget is spent and the goal is missed; "
        "0 of 3 lossless trials met the goal by then"
    )
    assert says["stop"] == "all 5 trials of the budget are used"
    times = [step.at_s for step in steps]
    assert times == sorted(times)
    first_harmful = next(at for at, s in enumerate(steps) if (s.kind, s.trial) == ("trial", 3))
    assert [step.kind for step in steps].index("unlock") < first_harmful
    assert steps[-1].kind == "decide"


def test_the_sampler_s_table_tells_each_trial_in_words(tuning_on, landscape, optuna_tables):
    tuning = tuning_on(budget=BUDGET, base=ONLY_BLOCK_SIZE, max_harm=Harm.LOSSLESS)
    tuning.run()
    study = optuna.load_study(study_name=tuning.study.name, storage=tuning.store.url)
    told = {
        trial.user_attrs["kvtune trial"]: trial.user_attrs["settings"]
        for trial in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    }
    assert told == {
        row.number: ", ".join(f"{n} {v}" for n, v in row.trial.stack.arguments.items())
        or "stock defaults"
        for row in tuning.store.trials(tuning.study)
        if row.trial.parent is None
    }
