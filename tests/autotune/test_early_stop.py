"""Which trials race, and what becomes of a search whose hopeless trials are cut."""

import optuna
import pytest
from contracts.landscape import GOAL, ONLY_BLOCK_SIZE, Landscape, failed, run_of

from kvtune.autotune.early_stop import EarlyStop
from kvtune.autotune.ledger import RUNG_BASELINE, RUNG_CONFIRM, RUNG_LOSSLESS, RUNG_NEAR_LOSSLESS
from kvtune.autotune.limits import Budget
from kvtune.types import Choice, Harm, PolicyStack, Status, Trial


def trial(harm=Harm.LOSSLESS):
    choice = Choice(policy="p", parameters={}, arguments={"a": 1}, harm=harm)
    return Trial(
        number=9, stack=PolicyStack(choices=(choice,)), base_arguments={}, repeats=1, seed=0
    )


class Cutting(Landscape):
    """Cuts what has less than half of the goodput of stock, if anybody watches it."""

    def run_trial(self, trial, bench, requests, *, watch, **options):
        measurement, runs = super().run_trial(trial, bench, requests, **options)
        self.watched.append((trial.number, trial.parent, watch))
        goodput = measurement.metrics.get("goodput_requests_per_s", (9.0,))[0]
        if watch is None or goodput >= 0.5:
            return measurement, runs
        cut = {"status": Status.CUT, "share": 0.45, "cut": "cut after 45% of its requests"}
        return measurement.model_copy(update=cut), runs


@pytest.fixture
def landscape(quick_sampler):
    made = Cutting(
        goodput=lambda arguments: (
            {32: 2.0, 64: 0.4}.get(arguments["block-size"], 1.0)
            if "block-size" in arguments
            else 1.0
        )
    )
    made.watched = []
    return made


def searched(tuning_on, **rules):
    made = tuning_on(base=ONLY_BLOCK_SIZE, budget=Budget(trials=4), **rules)
    return made, made.run()


def test_all_but_the_baseline_and_confirmations_are_watched(landscape, tuning_on):
    searched(tuning_on, max_harm=Harm.LOSSLESS)
    for number, parent, watch in landscape.watched:
        assert (watch is not None) == (number != 0 and parent is None)


def test_nobody_watches_where_that_is_not_wanted(landscape, tuning_on):
    made, _ = searched(tuning_on, max_harm=Harm.LOSSLESS, early_stop=False)
    assert all(watch is None for *_, watch in landscape.watched)
    assert all(entry.measurement.status is Status.OK for entry in made.ledger.entries)


def test_whether_trials_may_be_cut_is_no_part_of_what_a_measurement_is(landscape, tuning_on):
    made, _ = searched(tuning_on, max_harm=Harm.LOSSLESS)
    keys = {row.number: row.key for row in made.store.trials(made.study)}
    other, _ = searched(tuning_on, max_harm=Harm.LOSSLESS, early_stop=False, remeasure=True)
    assert other.study.name == made.study.name
    assert {row.number: row.key for row in made.store.trials(made.study)} == keys


def test_a_cut_trial_has_no_value_and_its_reason_is_said(landscape, tuning_on):
    made, decision = searched(tuning_on, max_harm=Harm.LOSSLESS)
    (cut,) = [e for e in made.ledger.entries if e.measurement.status is Status.CUT]
    assert cut.trial.arguments["block-size"] == 64
    assert decision.rejected[cut.trial.number] == "cut after 45% of its requests"
    assert decision.recommended != cut.trial.number
    row = made.store.trial(made.study, cut.trial.number)
    assert row.measured
    assert row.measurement.share == 0.45
    assert len(made.store.records(made.study, cut.trial.number)) == 1
    (summary,) = made.store.studies()
    assert summary.trials["cut"] == 1
    assert made.store.known(row.key) is None, "no other study takes it for a measurement"


def test_a_cut_trial_is_not_tried_again_unless_all_is(landscape, tuning_on):
    searched(tuning_on, max_harm=Harm.LOSSLESS)
    before = landscape.points.count(landscape.points[-1])
    count = len(landscape.points)
    searched(tuning_on, max_harm=Harm.LOSSLESS)
    assert len(landscape.points) == count
    assert before == 1
    searched(tuning_on, max_harm=Harm.LOSSLESS, remeasure=True)
    again = [arguments.get("block-size") for arguments in landscape.points[count:]]
    assert 64 in again


def test_without_early_stop_what_an_earlier_run_cut_is_measured_to_its_end(landscape, tuning_on):
    made, _ = searched(tuning_on, max_harm=Harm.LOSSLESS)
    (cut,) = [e.trial for e in made.ledger.entries if e.measurement.status is Status.CUT]
    count = len(landscape.asked)
    again, decision = searched(tuning_on, max_harm=Harm.LOSSLESS, early_stop=False)
    assert landscape.asked[count].trial == cut, "the same trial, once more"
    assert landscape.points.count(cut.arguments) == 2
    (whole,) = [e for e in again.ledger.entries if e.trial.number == cut.number]
    assert whole.measurement.status is Status.OK
    assert again.store.trial(again.study, cut.number).measurement.status is Status.OK
    assert "cut" not in str(decision.rejected.get(cut.number))


def test_what_was_cut_stays_so_where_no_time_is_left_to_measure_it(landscape, tuning_on):
    searched(tuning_on, max_harm=Harm.LOSSLESS)
    landscape.trial_s = 10
    made = tuning_on(
        base=ONLY_BLOCK_SIZE,
        budget=Budget(trials=4, time_s=5.0),
        max_harm=Harm.LOSSLESS,
        early_stop=False,
    )
    made.run()
    assert [e.measurement.status for e in made.ledger.entries].count(Status.CUT) == 1
    assert "no time is left to measure to its end what an earlier run cut" in made.reporter.notes


def test_the_sampler_is_told_that_a_cut_trial_was_pruned(landscape, tuning_on, optuna_tables):
    made, _ = searched(tuning_on, max_harm=Harm.LOSSLESS)
    (cut,) = [e for e in made.ledger.entries if e.measurement.status is Status.CUT]
    number = made.store.trial(made.study, cut.trial.number).optuna_number
    study = optuna.load_study(study_name=made.study.name, storage=made.store.url)
    told = study.trials[number]
    assert told.state is optuna.trial.TrialState.PRUNED
    assert told.intermediate_values == {45: pytest.approx(0.4, rel=0.01)}
    assert told.value == pytest.approx(0.4, rel=0.01)


# --- who is raced with --------------------------------------------------------------------------


@pytest.fixture
def tried(landscape, tuning_on):
    """A `SoFar` with these trials measured: (harm, goodput or failure, TTFT) each, after stock."""

    def make(*points):
        made = tuning_on(base=ONLY_BLOCK_SIZE)
        so_far = made.so_far
        landscape.goodput = lambda arguments: wanted[0]
        landscape.ttft_s = lambda arguments: wanted[1]
        for number, (harm, goodput, ttft_s) in enumerate([(Harm.LOSSLESS, 1.0, 0.5), *points]):
            wanted = (goodput, ttft_s)
            choice = Choice(policy="p", parameters={}, arguments={"n": number}, harm=harm)
            rung = RUNG_LOSSLESS if harm is Harm.LOSSLESS else RUNG_NEAR_LOSSLESS
            so_far.ledger.run(
                PolicyStack(choices=(choice,) if number else ()),
                made.tuning_set,
                repeats=1,
                seed=0,
                rung=rung if number else RUNG_BASELINE,
                canary=number == 0 or harm is not Harm.LOSSLESS,
            )
        return EarlyStop(so_far)

    return make


def raced_with(race):
    return None if race is None else race.best.trial


def test_a_trial_races_the_best_that_meets_the_goal(tried):
    stop = tried((Harm.LOSSLESS, 2.0, 0.5), (Harm.LOSSLESS, 9.0, 1.5), (Harm.LOSSLESS, failed(), 0))
    assert raced_with(stop.watch(trial(), RUNG_LOSSLESS)) == 1
    assert stop.watch(trial(), RUNG_BASELINE) is None
    assert stop.watch(trial(), RUNG_CONFIRM) is None


def test_what_harms_more_is_no_rival(tried):
    stop = tried((Harm.NEAR_LOSSLESS, 2.0, 0.5))
    assert raced_with(stop.watch(trial(), RUNG_LOSSLESS)) == 0
    near = trial(Harm.NEAR_LOSSLESS)
    assert raced_with(stop.watch(near, RUNG_NEAR_LOSSLESS)) == 1


def test_the_first_that_may_change_answers_runs_to_its_end(tried):
    near = trial(Harm.NEAR_LOSSLESS)
    assert tried().watch(near, RUNG_NEAR_LOSSLESS) is None


def test_nobody_is_raced_with_while_nothing_meets_the_goal(landscape, tried, tuning_on):
    made = tuning_on(goal=replace_limit(GOAL), base=ONLY_BLOCK_SIZE)
    landscape.goodput = lambda arguments: 1.0
    made.so_far.ledger.run(
        PolicyStack(), made.tuning_set, repeats=1, seed=0, rung=RUNG_BASELINE, canary=True
    )
    assert EarlyStop(made.so_far).watch(trial(), RUNG_LOSSLESS) is None


def replace_limit(goal):
    (slo,) = goal.slos
    return goal.model_copy(update={"slos": (slo.model_copy(update={"limit_s": 0.1}),)})


def test_the_pace_is_that_of_the_stored_run(tried):
    race = tried().watch(trial(), RUNG_LOSSLESS)
    ended_s = sorted(record.end_s for record in run_of().records)
    assert race.best.ended_s == tuple(ended_s)
