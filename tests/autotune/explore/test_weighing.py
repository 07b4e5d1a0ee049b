"""Several objectives as one: which point is the best depends on the weight, and none that is beaten
ever is."""

from dataclasses import replace

import numpy as np
import pytest
from contracts.surfaces import CTX
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.explore.candidates import Candidate
from kvtune.autotune.explore.weighing import Weighing, foretold_bytes, weighing_of
from kvtune.autotune.limits import Also
from kvtune.types import Choice, EffectiveConfig, Harm, PolicyStack

SHARES = st.floats(0, 1, allow_nan=False)


def point(**arguments):
    """Served by these arguments; a format of the cache may change answers."""
    choices = tuple(
        Choice(
            policy=name,
            parameters={name: value},
            arguments={name.replace("_", "-"): value},
            harm=Harm.NEAR_LOSSLESS if "dtype" in name else Harm.LOSSLESS,
        )
        for name, value in arguments.items()
    )
    return Candidate(arguments, PolicyStack(choices=choices))


def drawn(points, known, also=(Also.QUALITY,), ctx=CTX, seed=(0, 0), expected=None):
    expected = np.ones(len(points)) if expected is None else np.array(expected)
    return weighing_of(also, points, known, ctx, expected=expected, seed=seed)


@given(
    weight=st.floats(0.01, 0.99),
    ours=st.tuples(SHARES, SHARES),
    more=st.floats(0.01, 1),
    less=SHARES,
)
def test_a_point_that_is_beaten_is_never_worth_more(weight, ours, more, less):
    gained, lost = ours
    weighing = Weighing(np.array([weight, 1 - weight]), 1.0, 1.0, np.array([[lost * less, lost]]))
    better, worse = weighing.of(np.array([gained + more, gained]))
    assert better > worse or better == worse == 0, "0 is as bad as what cannot run"


def test_the_weight_decides_between_what_gains_and_what_costs_little():
    costs = np.array([[1.0, 0.4, 0.0]])
    gains = np.array([1.0, 0.8, 0.1])
    best = [
        int(Weighing(np.array([own, 1 - own]), 1.0, 1.0, costs).of(gains).argmax())
        for own in (0.99, 0.6, 0.05)
    ]
    assert best == [0, 1, 2], "every point of the front is the best by some weight"


def test_points_of_some_rows_are_worth_what_all_are():
    weighing = Weighing(np.array([0.5, 0.5]), 2.0, 1.5, np.array([[0.0, 0.3, 1.0]]))
    gains = np.array([0.5, 1.0, 2.0])
    some = weighing.of(gains[[2, 0]][:, None] * np.ones((2, 4)), np.array([2, 0]))
    assert some == pytest.approx(weighing.of(gains)[[2, 0]][:, None] * np.ones((2, 4)))


def test_equal_seeds_draw_equal_weights_and_every_trial_another_one():
    points = [point(), point(kv_cache_dtype="fp8")]
    first, again, next_one = (drawn(points, [], seed=(3, n)).weights for n in (5, 5, 6))
    assert (first == again).all()
    assert (first != next_one).any()
    assert first.sum() == pytest.approx(1)


def test_points_with_the_same_format_are_thought_to_answer_alike():
    points = [
        point(),
        point(kv_cache_dtype="fp8"),
        point(kv_cache_dtype="fp8", block_size=32),
        point(kv_cache_dtype="int4"),
    ]
    known = [(0, {"quality": 0.0}), (1, {"quality": 0.01}), (3, {"quality": 0.04})]
    assert drawn(points, known).losses == pytest.approx(np.array([[0.0, 0.25, 0.25, 1.0]]))


def test_a_format_that_was_never_asked_is_thought_to_lose_nothing_until_it_is():
    points = [point(), point(kv_cache_dtype="fp8"), point(kv_cache_dtype="int4")]
    losses = drawn(points, [(1, {"quality": 0.01})]).losses
    assert losses == pytest.approx(np.array([[0.0, 1.0, 0.0]]))


def test_where_all_cost_the_same_nothing_is_lost():
    assert (drawn([point(), point(block_size=32)], []).losses == 0).all()


def test_memory_is_foretold_by_arithmetic_and_corrected_by_what_an_engine_said():
    gpu = replace(
        CTX,
        device=CTX.device.model_copy(update={"memory_bytes": 1000}),
        baseline=EffectiveConfig(kv_cache_memory_bytes=500),
    )
    assert foretold_bytes({}, gpu) == 500
    assert foretold_bytes({"gpu-memory-utilization": 0.82}, gpu) == pytest.approx(400)
    points = [point(), point(gpu_memory_utilization=0.82), point(gpu_memory_utilization=0.87)]
    told = drawn(points, [], also=(Also.MEMORY,), ctx=gpu).losses
    assert told == pytest.approx(np.array([[1.0, 0.0, 0.5]]))
    seen = drawn(points, [(2, {"memory": 400.0})], also=(Also.MEMORY,), ctx=gpu).losses
    assert seen == pytest.approx(np.array([[1.0, 0.0, 0.0]]))


def test_blocks_of_a_fixed_number_take_memory_by_their_size_and_format():
    sizes = [
        foretold_bytes({"num-gpu-blocks-override": 64, "block-size": 32, **more}, CTX)
        for more in ({}, {"block-size": 64}, {"kv-cache-dtype": "fp8"})
    ]
    assert [one / sizes[0] for one in sizes] == [1, 2, 0.5]


def test_memory_that_nobody_tells_is_unknown():
    assert foretold_bytes({}, replace(CTX, baseline=None)) is None


def test_objectives_count_by_how_far_they_are_apart_at_the_ends_of_the_front():
    """The fastest costs 4 and has 10, the best of the cheapest ones has 8; a fourth costs 8."""
    points = [point(), point(block_size=32), *(point(kv_cache_dtype=f"f{n}") for n in (1, 2, 3))]
    known = [(2, {"quality": 2.0}), (3, {"quality": 4.0}), (4, {"quality": 8.0})]
    found = drawn(points, known, expected=[6, 8, 9, 10, 3])
    assert (found.most, found.spread) == (10, 2)
    assert found.losses == pytest.approx(np.array([[0, 0, 0.5, 1, 2]]))


def test_where_the_cheapest_is_as_fast_as_any_a_tenth_is_all_there_is_to_lose():
    found = drawn([point(), point(block_size=32)], [], expected=[5, 10])
    assert (found.most, found.spread) == (10, 1)
