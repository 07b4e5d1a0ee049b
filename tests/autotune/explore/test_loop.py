"""How a search uses what a proposer says: in time, in Optuna's tables, and with repeats."""

from functools import partial
from threading import Event

import optuna
import pytest
from contracts.landscape import ONLY_BLOCK_SIZE, failed

from kvtune.autotune.explore.advice import Advice
from kvtune.autotune.explore.base import Pick
from kvtune.autotune.explore.measuring import REPEAT_SEED
from kvtune.autotune.ledger import RUNG_REPEAT
from kvtune.autotune.limits import Budget
from kvtune.autotune.space import stack_from
from kvtune.types import FailureClass, Harm, Outcome, Regret, Status

GOODPUT = {32: 2.0, 64: 1.5, 128: 1.0, 256: 0.5}
SURE = Regret(within={"1%": 0.5, "2%": 0.9, "5%": 1.0}, bound_ratio=0.04, points=4, says="near")


class Scripted:
    """Proposes these block sizes in turn; one that comes twice is measured once more."""

    def __init__(self, *sizes, ends="", best=None):
        self.sizes, self.ends, self.best, self.seen = list(sizes), ends, best, []

    def observe(self, observation):
        self.seen.append(observation)

    def pick(self, space, ctx, *, seconds_left, trials_left):
        if not self.sizes:
            return None
        values = {**space.defaults, "block_size": self.sizes.pop(0)}
        return Pick(values, stack_from(space, values, ctx), "it was written down", None)

    def stop(self, space, ctx):
        return "" if self.sizes else self.ends

    def chance(self, space, ctx):
        return 1.0

    def recommended(self, space, ctx):
        return self.best

    def left_out(self, space, ctx):
        return {"watermark": "nothing changes"}

    def regret(self, recommended, space, ctx):
        return SURE


class Hung(Scripted):
    """Has no answer to anything, ever."""

    def __init__(self):
        super().__init__()
        self.gate = Event()

    def observe(self, observation):
        self.gate.wait()


class Harmful(Scripted):
    """Chooses what may change answers, and where nothing does, stock defaults once more."""

    def pick(self, space, ctx, *, seconds_left, trials_left):
        values = space.defaults
        if "kv_cache_dtype" in values:
            values |= {"kv_cache_dtype": "fp8", "block_size": self.sizes.pop(0)}
        stack = stack_from(space, values, ctx)
        return Pick(values, stack, "it was written down", None, again=not stack.arguments)


@pytest.fixture
def search(tuning_on, landscape, monkeypatch):
    """Makes a search that `proposer` leads over four block sizes."""
    landscape.goodput = lambda arguments: GOODPUT[arguments.get("block-size", 128)]

    def make(proposer, **changed):
        monkeypatch.setattr("kvtune.autotune.tune.proposer_by", lambda *_: proposer)
        usual = {"base": ONLY_BLOCK_SIZE, "max_harm": Harm.LOSSLESS}
        usual["budget"] = Budget(trials=6, finalists=1, confirm_rounds=3)
        return tuning_on(**{**usual, **changed})

    return make


def sizes(landscape):
    return [arguments.get("block-size") for arguments in landscape.points]


def finalist(tuning, landscape):
    """What was confirmed beside the defaults."""
    rounds = [one.trial for one in landscape.asked if 0 < one.trial.seed < REPEAT_SEED]
    (found,) = {trial.parent for trial in rounds} - {0}
    return tuning.store.trial(tuning.study, found).trial.stack.arguments


def in_optuna(tuning):
    return optuna.load_study(study_name=tuning.study.name, storage=tuning.store.url).trials


def test_what_the_proposer_says_is_measured_and_kept_in_optunas_tables(
    search, landscape, optuna_tables
):
    tuning = search(Scripted(32, 256))
    tuning.run()
    assert sizes(landscape) == [None, 32, 256]
    stock, *others = in_optuna(tuning)
    assert [trial.params["block_size"] for trial in others] == [0, 3]
    assert [trial.value for trial in others] == [2.0, 0.5]
    assert {trial.user_attrs["because"] for trial in others} == {"it was written down"}
    assert "because" not in stock.user_attrs


def test_why_each_trial_is_tried_is_a_step_of_its_own(search):
    tuning = search(Scripted(32, 32, 256))
    tuning.run()
    told = {row.trial: row.says for row in tuning.store.steps(tuning.study) if row.trial}
    assert told == {
        1: "trial 1: it was written down",
        2: "trial 2, trial 1 once more: it was written down",
        3: "trial 3: it was written down",
    }
    kept = {row.number: row.trial for row in tuning.store.trials(tuning.study)}
    assert kept[2].parent == 1
    assert kept[3].stack.arguments == {"block-size": 256}


def test_it_is_told_of_the_baseline_first_and_of_every_trial_once(search):
    proposer = Scripted(32, 256)
    search(proposer).run()
    assert [one.arguments for one in proposer.seen] == [{}, {"block-size": 32}, {"block-size": 256}]
    assert [one.figures["goodput_requests_per_s"] for one in proposer.seen] == [1.0, 2.0, 0.5]
    assert [one.at_s for one in proposer.seen] == [0.0, 1.0, 2.0], "each took a second"


def test_a_search_that_goes_on_tells_it_all_that_was_measured_before(search, landscape):
    search(Scripted(32), budget=Budget(trials=2, finalists=1, confirm_rounds=3)).run()
    proposer = Scripted(256)
    search(proposer).run()
    assert [one.arguments for one in proposer.seen] == [{}, {"block-size": 32}, {"block-size": 256}]
    assert sizes(landscape) == [None, 32, 256]


def test_a_failed_launch_is_told_with_its_class(search, landscape):
    landscape.goodput = lambda arguments: (
        failed(FailureClass.OUT_OF_MEMORY) if "block-size" in arguments else 1.0
    )
    proposer = Scripted(32)
    search(proposer).run()
    assert [one.failure for one in proposer.seen] == [None, FailureClass.OUT_OF_MEMORY]
    assert proposer.seen[1].figures == {}


def test_one_that_hangs_is_replaced_by_new_points_at_random(search, landscape, monkeypatch):
    monkeypatch.setattr("kvtune.autotune.explore.loop.Advice", partial(Advice, limit_s=0.02))
    proposer = Hung()
    tuning = search(proposer)
    decision = tuning.run()
    assert sorted(filter(None, sizes(landscape))) == [32, 64, 256]
    said = [note for note in tuning.reporter.notes if "drawn at random" in note]
    assert said == ["a point was drawn at random where the model gave none: no answer in 0.02 s"]
    assert decision.outcome is Outcome.WINNER
    assert decision.regret is None
    proposer.gate.set()


def test_a_search_ends_before_its_budget_with_the_sentence_of_the_proposer(search, landscape):
    tuning = search(Scripted(32, ends="nothing is left to gain"))
    tuning.run()
    assert sizes(landscape) == [None, 32]
    assert [row.says for row in tuning.store.steps(tuning.study) if row.step == "stop"] == [
        "nothing is left to gain"
    ]


def test_what_is_left_out_is_said_once(search):
    tuning = search(Scripted(32, 64, 256))
    tuning.run()
    assert [note for note in tuning.reporter.notes if note.startswith("tried only")] == [
        "tried only in stacks where it matters; beside the stock defaults and beside the best that "
        "is foretold: watermark: nothing changes"
    ]


def test_the_decision_says_how_far_it_may_be_from_the_best(search, store):
    tuning = search(Scripted(32, 64))
    decision = tuning.run()
    assert decision.regret == store.decision(tuning.study).regret == SURE
    assert "by all trials of the search together, near" in decision.reasons


def test_the_favourite_of_the_model_is_confirmed_whoever_was_luckier(search, landscape):
    tuning = search(Scripted(32, 64, 256, best={"block-size": 64}))
    tuning.run()
    assert finalist(tuning, landscape) == {"block-size": 64}
    assert (
        "trial 2 is confirmed in place of trial 1: by all trials together, the search's model "
        "takes it for the best"
    ) in tuning.reporter.notes


def test_a_favourite_that_failed_is_not_confirmed(search, landscape):
    steady = landscape.goodput
    landscape.goodput = lambda arguments: (
        failed() if arguments.get("block-size") == 64 else steady(arguments)
    )
    tuning = search(Scripted(32, 64, 256, best={"block-size": 64}))
    tuning.run()
    assert finalist(tuning, landscape) == {"block-size": 32}
    assert not any("in place of" in note for note in tuning.reporter.notes)


# --- repeats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 9])  # It ends the search, or the proposer does.
def test_a_rung_that_nothing_is_chosen_from_gets_a_trial_for_its_price(search, budget):
    tuning = search(
        Harmful(32, 64, ends="enough"),
        explore_lossy=True,
        max_harm=Harm.NEAR_LOSSLESS,
        budget=Budget(trials=budget, finalists=1, confirm_rounds=3),
    )
    tuning.run()
    harms = [entry.trial.stack.harm for entry in tuning.so_far.tried]
    assert harms == [Harm.LOSSLESS, Harm.NEAR_LOSSLESS, Harm.NEAR_LOSSLESS, Harm.LOSSLESS]
    assert tuning.so_far.tried[-1].trial.parent is None


def test_a_point_that_comes_again_is_a_repeat_and_no_confirmation(search, landscape, store):
    proposer = Scripted(32, 32, 64, 32, 256)
    tuning = search(proposer)
    tuning.run()
    tried = landscape.asked[:6]
    assert [one.trial.parent for one in tried] == [None, None, 1, None, 1, None]
    assert [one.trial.seed for one in tried if one.trial.parent] == [REPEAT_SEED, REPEAT_SEED + 1]
    assert len(proposer.seen) == 6, "each is an observation"
    rows = [row for row in store.trials(tuning.study) if row.rung == RUNG_REPEAT]
    assert [row.trial.parent for row in rows] == [1, 1]
    # Three rounds of two, the repeats not among them.
    assert len(landscape.asked) == 6 + 6
    assert tuning.so_far.repeats(1) != []


def test_repeats_count_in_the_ranking_of_trials(search, landscape):
    lucky = iter([3.0, 0.5, 0.5])
    steady = landscape.goodput
    landscape.goodput = lambda arguments: (
        next(lucky, 0.5) if arguments.get("block-size") == 32 else steady(arguments)
    )
    tuning = search(Scripted(32, 64, 32, 32))
    tuning.run()
    assert finalist(tuning, landscape) == {"block-size": 64}


def test_a_point_that_fails_when_it_is_repeated_is_out(search, landscape):
    left = iter([2.0, failed()])
    steady = landscape.goodput
    landscape.goodput = lambda arguments: (
        next(left) if arguments.get("block-size") == 32 else steady(arguments)
    )
    tuning = search(Scripted(32, 64, 32))
    decision = tuning.run()
    assert finalist(tuning, landscape) == {"block-size": 64}
    assert decision.rejected[1] == "crash-under-load: it died"


def test_what_failed_once_is_not_recommended_where_nothing_is_confirmed(
    search, landscape, monkeypatch
):
    monkeypatch.setattr("kvtune.autotune.so_far.SoFar.has_time", lambda self, **_: True)
    left = iter([2.0, failed()])
    landscape.goodput = lambda arguments: next(left) if "block-size" in arguments else 1.0
    landscape.trial_s = 10.0
    tuning = search(Scripted(32, 32), budget=Budget(trials=3, time_s=29.0))
    decision = tuning.run()
    assert len(landscape.asked) == 3
    assert decision.recommended == 0


def test_a_repeat_that_the_machine_spoilt_spoils_nothing(search, landscape):
    left = iter([2.0, failed(FailureClass.PORT_TAKEN)])
    steady = landscape.goodput
    landscape.goodput = lambda arguments: (
        next(left, 2.0) if arguments.get("block-size") == 32 else steady(arguments)
    )
    tuning = search(Scripted(32, 32, 64))
    decision = tuning.run()
    winner = tuning.store.trial(tuning.study, decision.recommended).trial
    assert winner.stack.arguments == {"block-size": 32}


def test_an_interrupted_repeat_is_made_up_for(search, landscape, store):
    landscape.interrupt_at = 2
    stopped = search(Scripted(32, 32))
    stopped.run()
    assert stopped.interrupted
    landscape.interrupt_at = None
    onward = search(Scripted(32, 64))
    onward.run()
    assert [one.trial.parent for one in landscape.asked[2:4]] == [1, None]
    assert all(row.measurement.status is Status.OK for row in store.trials(onward.study))
