"""Where a search stands after each of its trials, as the live view gets it."""

import math

import pytest
from contracts.landscape import ONLY_BLOCK_SIZE, Recorder, failed

from kvtune.autotune.limits import Budget
from kvtune.autotune.search_view import Plan
from kvtune.types import FailureClass, Harm, Measurement, OutputHealth, Status


class Watching(Recorder):
    """Keeps every view, and how many trials had ended when it came."""

    def __init__(self):
        super().__init__()
        self.views = []

    def standing(self, view):
        self.views.append((len(self.trials), view))


@pytest.fixture
def watched(tuning_on, landscape):
    """Runs a search over block sizes and gives its views."""

    def run(trials=5, **more):
        watching = Watching()
        budget = Budget(trials=trials, finalists=1, confirm_rounds=2, **more)
        tuning_on(
            base=ONLY_BLOCK_SIZE, budget=budget, reporter=watching, max_harm=Harm.LOSSLESS
        ).run()
        return watching.views

    return run


def test_a_view_comes_before_each_trial_and_after_the_last(watched):
    views = watched(trials=4)
    assert [ended for ended, _ in views] == [1, 2, 3, 4]
    assert [view.tried for _, view in views] == [1, 2, 3, 4]
    assert [view.plan.trials for _, view in views] == [3, 2, 1, 0]
    assert {view.most for _, view in views} == {4}


def test_the_best_is_told_beside_stock_and_its_limits(watched, landscape):
    landscape.goodput = lambda arguments: 3.0 if arguments.get("block-size") == 32 else 2.0
    landscape.ttft_s = lambda arguments: 0.25
    views = [view for _, view in watched(trials=8)]
    first, last = views[0].best, views[-1].best
    assert (first.number, first.settings, first.over_stock) == (0, "stock defaults", 1.0)
    assert last.settings == "block-size 32"
    assert (last.value, last.over_stock, last.meets_goal) == (3.0, 1.5, True)
    (margin,) = last.margins
    assert margin.value_s == 0.25


def test_what_meets_the_goal_is_before_what_has_more(watched, landscape):
    landscape.goodput = lambda arguments: 1.0 if arguments.get("block-size") == 32 else 2.0
    landscape.ttft_s = lambda arguments: 0.25 if arguments.get("block-size") == 32 else 9.0
    views = [view for _, view in watched(trials=8)]
    assert not views[0].best.meets_goal
    assert (views[-1].best.settings, views[-1].best.over_stock) == ("block-size 32", 0.5)


def test_where_nothing_meets_the_goal_the_closest_is_the_best(watched, landscape):
    landscape.goodput = lambda arguments: 1.0 if arguments.get("block-size") == 32 else 2.0
    landscape.ttft_s = lambda arguments: 1.5 if arguments.get("block-size") == 32 else 9.0
    best = watched(trials=8)[-1][1].best
    assert (best.settings, best.meets_goal) == ("block-size 32", False)


def test_rungs_say_what_they_open_and_how_often_they_were_tried(watched):
    ladder = watched(trials=4)[-1][1].ladder
    assert [(rung.name, rung.state, rung.tried) for rung in ladder] == [
        ("L0 stock", "done", 1),
        ("L1 lossless", "open", 3),
    ]
    assert ladder[1].why == "block_size"


def test_failures_are_counted_by_class(watched, landscape):
    def goodput(arguments):
        is_stock = "block-size" not in arguments
        return 1.0 if is_stock else failed(FailureClass.CRASH_AT_START)

    landscape.goodput = goodput
    last = watched(trials=4)[-1][1]
    assert last.tried > 1
    assert last.failures == {"crash-at-start": last.tried - 1}
    assert last.out == {}


def test_who_was_given_up_or_may_not_be_shipped_did_not_fail(watched, landscape):
    cut = Measurement(status=Status.CUT, share=0.5, cut="hopeless", wall_s=1.0)
    landscape.goodput = lambda arguments: cut if arguments.get("block-size") == 32 else 1.0

    def outputs(trial):
        looping = 90 if trial.arguments.get("block-size") == 64 else 0
        return OutputHealth(answers=100, text_prompts=100, long_prompts=100, looping=looping)

    landscape.outputs = outputs
    last = watched(trials=4)[-1][1]
    assert last.failures == {}
    assert last.out == {"given up early": 1, "may not be shipped": 1}


def test_a_plan_spends_what_is_left_on_the_end_first():
    plan = Plan(trials=9, left_s=300.0, trial_s=30.0, confirming_s=100.0, asking_s=50.0)
    assert (plan.affordable, plan.expected_s) == (5, 300.0)
    late = Plan(trials=9, left_s=100.0, trial_s=30.0, confirming_s=100.0, asking_s=50.0)
    assert (late.affordable, late.expected_s) == (0, 100.0)
    endless = Plan(trials=3, left_s=math.inf, trial_s=30.0, confirming_s=100.0, asking_s=0.0)
    assert (endless.affordable, endless.expected_s) == (3, 190.0)
    unknown = Plan(trials=3, left_s=10.0, trial_s=0.0, confirming_s=0.0, asking_s=0.0)
    assert unknown.affordable == 3
