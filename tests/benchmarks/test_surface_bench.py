"""A recorded surface in the place of servers."""

from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
import surface_bench
from surface_bench import (
    Judge,
    SurfaceRunner,
    known_to_fail,
    plan_of,
    point_of,
    recorded_surfaces,
    requests_of,
    space_of,
    stock_of,
    worth,
)
from surface_file import read_recording
from surface_spec import changed

from kvtune.autotune.space import stack_from
from kvtune.profilers.goal import parse_goal
from kvtune.types import FailureClass, PolicyStack, Status, Trial

SIMULATED = Path(surface_bench.__file__).parent / "surfaces" / "simulated-dear-blocks.jsonl.xz"
TOO_LARGE = (256, 128, 2048, "auto")
"""Seven blocks of 256 tokens hold no sequence of 2,048."""


@cache
def surfaces():
    return recorded_surfaces(read_recording(SIMULATED))


@pytest.fixture
def surface():
    return surfaces()[1]


def test_three_goals_are_made_and_each_leaves_less(surface):
    meeting = [sum(one > 0 for one in Judge(each).worth.values()) for each in surfaces()]
    assert meeting[0] > meeting[1] > meeting[2] > 0
    assert [len(each.goal.slos) for each in surfaces()] == [0, 2, 2]


def test_the_space_is_kvtunes_own_with_the_recorded_values(surface):
    space = space_of(surface.axes, surface.context)
    for entry in space.knobs:
        axis = next(axis for axis in surface.axes if axis.knob == entry.knob.name)
        assert set(entry.knob.choices) <= set(axis.values)
        assert entry.knob.default == axis.stock
    # Blocks of 256 tokens are offered too: in 8 bits a sequence fits in them.
    assert {len(entry.knob.choices) for entry in space.knobs} == {2, 3, 4, 7}
    for values in ({"max_num_seqs": 3, "kv_cache_dtype": "fp8"}, {"block_size": 32}):
        stack = stack_from(space, values, surface.context)
        point = point_of(surface.axes, stack.arguments)
        assert point in surface.points
        assert changed(surface.axes, point) == stack.arguments


def test_arithmetic_knows_the_points_that_did_not_start(surface):
    failed = {point for point in surface.points if not surface.figures(point)}
    known = {
        point
        for point in surface.points
        if known_to_fail(surface.axes, point, surface.context) is not None
    }
    assert TOO_LARGE in failed
    assert failed == known


def test_measurements_are_noise_around_the_truth(surface):
    point, random = (32, 8, 1024, "auto"), Random(1)
    surface.drift, name = False, "requests_per_s"
    try:
        drawn = [surface.measured(point, random, 0.0) for _ in range(200)]
    finally:
        surface.drift = True
    rates = [one.figures[name] for one in drawn]
    assert np.mean(rates) == pytest.approx(surface.figures(point)[name], rel=0.02)
    assert 0.01 < np.std(np.log(rates)) < 0.15
    walls_s = [one.wall_s - one.run.duration_s for one in drawn]
    assert walls_s == pytest.approx([6.5] * 200, abs=0.1)


def test_the_machine_of_a_search_drifts_as_the_recorded_one_did(surface):
    slow = [surface.truth.slowness(at_s) for at_s in np.linspace(0, 4000, 40)]
    assert 0.02 < np.std(slow) < 0.2
    whole_s = surface.truth.ended_s[-1]
    assert surface.truth.slowness(500.0 + whole_s) == pytest.approx(surface.truth.slowness(500.0))


def test_what_misses_a_limit_is_worth_nothing(surface):
    judge = Judge(surface)
    assert max(judge.worth.values()) == 1.0
    assert judge.worth[stock_of(surface.axes)] == 0.0
    goal = parse_goal("max goodput where p95 itl <= 100ms")
    near = {"goodput_requests_per_s": 3.0, "itl_p95_s": 0.102}
    assert worth(near, goal, 0.0) == 0.0
    assert worth(near, goal, 0.03) == 3.0


def test_simulations_are_calibrated_on_a_recorded_stock_run(surface):
    foretell = surface.foretell(Random(0))
    points = [point for point in surface.points if surface.figures(point)]
    told = [
        foretell(changed(surface.axes, point)).figures["requests_per_s"] for point in points[::7]
    ]
    true = [surface.figures(point)["requests_per_s"] for point in points[::7]]
    assert np.corrcoef(np.log(told), np.log(true))[0, 1] > 0.8


def test_a_search_can_measure_its_trials_there(surface):
    runner = SurfaceRunner(surface, Random(0))
    space = space_of(surface.axes, surface.context)

    def trial(values):
        stack = stack_from(space, values, surface.context)
        return Trial(
            number=1,
            stack=stack,
            base_arguments=dict(surface.context.base_arguments),
            repeats=2,
            seed=1,
        )

    found, runs = runner(
        trial({"block_size": 32}),
        None,
        requests_of(surface.recording.header),
        canary=True,
        label="trial",
        afterwards=None,
    )
    assert found.status is Status.OK
    assert found.effective.block_size_tokens == 32
    assert len(runs) == 2
    assert found.metrics["requests_per_s"][0] != found.metrics["requests_per_s"][1]
    assert runner.clock() == pytest.approx(found.wall_s)
    assert found.canary_answers is not None


def test_a_trial_of_a_point_that_fails_fails_alike(surface):
    runner = SurfaceRunner(surface, Random(0))
    arguments = changed(surface.axes, TOO_LARGE)
    stack = PolicyStack(
        choices=[
            {"policy": "block_size", "parameters": {}, "arguments": arguments, "harm": "lossless"}
        ]
    )
    trial = Trial(number=1, stack=stack, base_arguments={}, repeats=1, seed=1)
    found, runs = runner(trial, None, (), canary=False, label="trial", afterwards=None)
    assert found.failure.failure is FailureClass.DOES_NOT_FIT
    assert found.failure.message
    assert runs == ()
    assert runner.clock() > 0


def test_the_load_is_the_recorded_one(surface):
    header = surface.recording.header
    assert len(requests_of(header)) == header.load["requests"]
    assert plan_of(header).key() == header.plan


def test_a_running_server_is_changed_where_nothing_else_than_its_scheduler_differs(surface):
    space = space_of(surface.axes, surface.context)
    base = dict(surface.context.base_arguments)

    def sides(*all_values, reuse):
        """What each trial takes beside its load."""
        runner = SurfaceRunner(surface, Random(0), reuse=reuse)
        for number, values in enumerate(all_values):
            stack = stack_from(space, values, surface.context)
            trial = Trial(number=number, stack=stack, base_arguments=base, repeats=1, seed=1)
            found, _ = runner(trial, None, (), canary=False)
            yield found.wall_s - found.load_s

    asked = ({}, {"max_num_seqs": 8}, {"block_size": 32}, {"block_size": 32, "max_num_seqs": 8})
    # Servers take 5 s to start and 0.5 s to end there, and warm up for 1 s.
    assert list(sides(*asked, reuse=False)) == pytest.approx([6.5] * 4, abs=0.1)
    assert list(sides(*asked, reuse=True)) == pytest.approx([6.5, 1.0, 6.5, 1.0], abs=0.1)


class Cutter:
    """Ends a run once `count` requests of it ended."""

    def __init__(self, count):
        self.count = count
        self.ended_s = []

    def saw(self, record):
        self.ended_s.append(record.end_s)

    def verdict(self, elapsed_s):
        return "hopeless" if len(self.ended_s) >= self.count else None


def test_a_trial_that_is_cut_takes_the_search_no_longer_than_that(surface):
    def measured(watch):
        runner = SurfaceRunner(surface, Random(0))
        stack = PolicyStack()
        trial = Trial(number=0, stack=stack, base_arguments={}, repeats=1, seed=1)
        found, (run,) = runner(trial, None, (), canary=False, watch=watch)
        return runner.now_s, found, run

    whole_s, whole, run = measured(None)
    watch = Cutter(10)
    cut_s, cut, seen = measured(watch)
    assert cut.status is Status.CUT
    assert cut.cut == "hopeless"
    assert cut.share == len(seen.records) / len(run.records) < 1
    assert len(seen.records) >= 10
    assert watch.ended_s == sorted(watch.ended_s)
    # The load client asks four times a second.
    assert 0 <= cut.load_s - watch.ended_s[-1] < 0.25
    assert whole_s - cut_s == pytest.approx(whole.load_s - cut.load_s)
    assert measured(Cutter(10_000))[1] == whole
