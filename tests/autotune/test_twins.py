"""Which trials run alike, by what their engines say, and what is made of their values."""

import pytest

from kvtune.autotune.ledger import Entry
from kvtune.autotune.twins import pooled, twins
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Failure,
    FailureClass,
    Harm,
    Measurement,
    PolicyStack,
    Status,
    Trial,
)

RUNNING = EffectiveConfig(block_size_tokens=32, num_gpu_blocks=100, max_num_seqs=8)


def point(number, arguments=None, effective=RUNNING, value=1.0, harm=Harm.LOSSLESS, failure=None):
    choice = Choice(policy="p", parameters={}, arguments=arguments or {}, harm=harm)
    trial = Trial(
        number=number,
        stack=PolicyStack(choices=(choice,)),
        base_arguments={},
        repeats=1,
        seed=0,
    )
    measurement = Measurement(
        status=Status.OK if failure is None else Status.FAILED,
        failure=failure,
        metrics={} if failure else {"goodput_requests_per_s": (value,)},
        effective=effective,
    )
    return Entry(trial, measurement, reused=False)


def running(**settings):
    return RUNNING.model_copy(update=settings)


def test_trials_whose_engines_run_with_the_same_settings_are_twins_of_the_first():
    points = [
        point(0),
        point(1, {"block-size": 16}, running(block_size_tokens=16)),
        point(2, {"block-size": 8}, running(block_size_tokens=16)),
        point(3, {"block-size": 4}, running(block_size_tokens=16)),
        point(4, {"max-num-seqs": 4}, running(max_num_seqs=4)),
    ]
    assert twins(points) == {2: 1, 3: 1}


def test_how_a_server_was_started_and_who_told_of_it_tells_no_twins_apart():
    points = [
        point(0, effective=running(start_kind="cold", source=("log",))),
        point(1, {"block-size": 16}, running(start_kind="warm", source=("metrics",))),
    ]
    assert twins(points) == {1: 0}


@pytest.mark.parametrize(
    ("arguments", "effective"),
    [
        ({"max-num-partial-prefills": 4}, RUNNING),
        ({"watermark": 0.1}, RUNNING),
        ({"block-size": 16}, None),
    ],
    ids=["an argument that is never told", "one that was not told here", "nothing told at all"],
)
def test_what_the_engine_does_not_tell_may_be_what_makes_the_difference(arguments, effective):
    assert twins([point(0, effective=effective), point(1, arguments, effective)]) == {}


def test_an_argument_is_the_same_however_it_is_spelt():
    points = [point(0, {"gpu-memory-utilization": 0.8}), point(1, {"gpu_memory_utilization": 0.8})]
    assert twins(points) == {1: 0}


def test_a_trial_that_failed_is_nobodys_twin():
    crash = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it died")
    points = [point(0), point(1, {"block-size": 16}, failure=crash)]
    assert twins(points) == {}
    assert pooled(points) == points


def test_of_twins_the_least_harmful_stands_for_all():
    """The engine took a format as its own: what it answers is what it always answers."""
    points = [
        point(
            1, {"kv-cache-dtype": "fp8"}, running(kv_cache_dtype="auto"), harm=Harm.NEAR_LOSSLESS
        ),
        point(2, {"block-size": 16}, running(kv_cache_dtype="auto")),
    ]
    assert twins(points) == {1: 2}
    assert [entry.trial.number for entry in pooled(points)] == [2]


def test_the_values_of_twins_are_repeats_of_the_one_that_stands_for_them():
    points = [
        point(0, value=5.0),
        point(1, {"block-size": 16}, running(block_size_tokens=16), value=1.0),
        point(2, {"block-size": 8}, value=7.0),
    ]
    first, other = pooled(points)
    assert first.trial == points[0].trial
    assert first.measurement.metrics == {"goodput_requests_per_s": (5.0, 7.0)}
    assert other.measurement.metrics == points[1].measurement.metrics
