import random
from dataclasses import replace

import pytest
from contracts.policy_samples import SMOLLM2
from contracts.surfaces import CTX, LARGE, SMALL, space_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.autotune.explore.candidates import (
    STOPS,
    beyond,
    candidate,
    candidates,
    is_ordered,
    key_of,
    moves,
    neighbours,
    options_of,
    place,
    values_of,
)
from kvtune.autotune.space import (
    SearchSpace,
    SpaceKnob,
    build_space,
    infeasible_reason,
    stack_from,
)
from kvtune.policies.base import Knob
from kvtune.types import Harm

SPACE, WIDE = space_of(SMALL), space_of(LARGE)
ANY = st.fixed_dictionaries({k.knob.name: st.sampled_from(k.knob.choices) for k in WIDE.knobs})


def all_of(space, most=100, seed=0):
    return candidates(space, CTX, most=most, rng=random.Random(seed))


def test_every_point_of_a_small_space_comes_once_the_simplest_first():
    found = all_of(SPACE)
    # 5 block sizes, 8 widths and 4 budgets, of which none breaks a rule.
    assert len(found) == len({one.key for one in found}) == 5 * 8 * 4
    assert found[0].values == SPACE.defaults
    costs = [one.stack.cost for one in found]
    assert costs == sorted(costs)
    assert costs[0] == (0, 0)


def test_of_a_large_space_the_defaults_all_single_moves_and_draws_are_looked_at():
    found = all_of(WIDE)
    assert len(found) == 100
    singles = [one for one in found if len(one.stack.arguments) <= 1]
    assert len(singles) == 1 + sum(len(k.knob.choices) - 1 for k in WIDE.knobs)
    assert [one.key for one in all_of(WIDE)] == [one.key for one in found]
    assert {one.key for one in all_of(WIDE, seed=1)} != {one.key for one in found}


@settings(deadline=None, max_examples=40)
@given(ANY)
def test_a_candidate_can_start_and_is_named_by_what_takes_effect(values):
    one = candidate(WIDE, values, CTX)
    assert infeasible_reason(one.stack, CTX) is None
    assert stack_from(WIDE, one.values, CTX).arguments == one.stack.arguments
    assert candidate(WIDE, one.values, CTX) == one
    assert values_of(WIDE, one.stack.arguments) == one.values


def test_a_point_that_cannot_fit_is_no_candidate(monkeypatch):
    monkeypatch.setattr(
        "kvtune.autotune.explore.candidates.infeasible_reason",
        lambda stack, ctx: "too long" if stack.arguments.get("block-size") == 256 else None,
    )
    assert candidate(SPACE, {"block_size": 256}, CTX) is None
    assert len(all_of(SPACE)) == 4 * 8 * 4


def test_neighbours_differ_in_one_knob():
    found = neighbours(SPACE, SPACE.defaults, CTX)
    assert len(found) == len(moves(SPACE, SPACE.defaults)) == 4 + 7 + 3
    assert all(len(one.stack.arguments) == 1 for one in found)


def test_keys_do_not_depend_on_order():
    assert key_of({"a": 1, "b": None}) == key_of({"b": None, "a": 1}) != key_of({"a": 1})


@pytest.mark.parametrize("entry", WIDE.knobs, ids=lambda entry: entry.knob.name)
def test_places_run_from_0_to_1_where_values_have_an_order(entry):
    places = [place(entry, value) for value in entry.knob.choices]
    if is_ordered(entry):
        assert (places[0], places[-1]) == (0.0, 1.0)
        assert places == sorted(places)
    else:
        assert len(set(places)) == len(places)


def test_a_knob_that_takes_any_number_is_looked_at_in_some_places():
    knob = Knob.span("share", 0.2, 0.8, default=0.55, unit="", because="")
    entry = SpaceKnob("kv_memory", knob, None, "")
    options = options_of(entry)
    assert len(options) == STOPS + 1
    assert (min(options), max(options)) == (0.2, 0.8)
    assert 0.55 in options
    assert place(entry, 0.5) == pytest.approx(0.5)


def test_a_value_is_found_again_from_the_argument_that_served_it():
    ctx = replace(CTX, engine=CTX.engine.model_copy(update={"platform": "cpu"}), model=SMOLLM2)
    space = build_space(ctx, harm=Harm.NEAR_LOSSLESS)
    values = {**space.defaults, "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": 2}
    one = candidate(space, values, ctx)
    assert len(one.stack.arguments) == 2
    assert values_of(space, one.stack.arguments) == values


def test_what_no_knob_sets_lies_beyond_the_space():
    arguments = {"block-size": 32, "kv-cache-dtype": "fp8"}
    assert beyond(SPACE, arguments) == {"kv-cache-dtype": "fp8"}
    assert beyond(SearchSpace((), {}), arguments) == arguments
