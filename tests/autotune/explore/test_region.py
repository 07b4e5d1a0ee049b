from dataclasses import replace

import numpy as np
import pytest
from contracts.policy_samples import WITH_PLUGIN, on_cpu, workload
from contracts.surfaces import CTX, LARGE, SMALL, space_of

from kvtune.autotune.explore.candidates import key_of, moves, place
from kvtune.autotune.explore.likeness import ROUGH, USUAL_AT
from kvtune.autotune.explore.prior import Foretold, Prior
from kvtune.autotune.explore.region import DRAWN, FORETOLD_FIRST, GROWN, Region
from kvtune.autotune.space import SearchSpace, build_space
from kvtune.policies.host_tier import KNOB
from kvtune.policies.plugin_arguments import HOST_BYTES
from kvtune.types import Harm

SPACE, WIDE = space_of(SMALL), space_of(LARGE)


def region_of(foretell=None, space=SPACE, seed=0):
    region = Region(space, CTX, Prior(foretell), lambda told: told.figures["score"], seed)
    region.look()
    return region


def told_by(score, course=key_of):
    """Foretells `score(places)` of arguments, by knob name; and keeps what it was asked."""
    asked = []

    def foretell(arguments):
        asked.append(dict(arguments))
        values = {**WIDE.defaults, **{k.replace("-", "_"): v for k, v in arguments.items()}}
        at = {k.knob.name: place(k, values[k.knob.name]) for k in WIDE.knobs}
        return Foretold({"score": score(at)}, course(arguments))

    foretell.asked = asked
    return foretell


def test_points_with_equal_runs_are_one_and_the_simplest_stands_for_them():
    def course(arguments):
        # Twenty are in flight: no more than that ever run.
        return key_of({**arguments, "max-num-seqs": min(arguments.get("max-num-seqs", 64), 12)})

    region = region_of(told_by(lambda at: 0.0, course))
    assert len(region.points) == 5 * (8 - 2) * 4
    assert region.row_of({"max-num-seqs": 12}) == region.row_of({}) == 0
    assert region.left_out() == {
        "max_num_seqs=12": "runs as 64",
        "max_num_seqs=16": "runs as 64",
    }


def test_a_knob_that_changes_no_run_is_left_out_as_a_whole():
    def course(arguments):
        return key_of({k: v for k, v in arguments.items() if k != "max-num-batched-tokens"})

    region = region_of(told_by(lambda at: at["block_size"], course))
    assert len(region.points) == 5 * 8
    assert region.left_out() == {
        "max_num_batched_tokens": "no value of it changes the simulated run"
    }


def test_nothing_is_said_of_what_was_not_looked_at_yet():
    region = Region(WIDE, CTX, Prior(told_by(lambda at: 0.0)), lambda told: 0.0, 0)
    region.look(until_s=0.0)
    assert len(region.points) < len(moves(WIDE, WIDE.defaults))
    assert region.left_out() == {}


def test_how_much_of_the_space_is_known_is_said():
    assert region_of(told_by(lambda at: 0.0, lambda arguments: 0)).extent == (
        "all 160 configurations"
    ), "those that run alike were looked at too"
    part = Region(WIDE, CTX, Prior(told_by(lambda at: 0.0)), lambda told: 0.0, 0)
    part.look(until_s=0.0)
    assert part.extent == f"the 1 configurations looked at, of {160 * 3 * 5:,}"


def test_what_nothing_starts_with_says_why():
    ctx = replace(CTX, base_arguments={"max-num-seqs": 9, "max-num-batched-tokens": 8})
    (entry,) = [k for k in SPACE.knobs if k.knob.name == "block_size"]
    region = Region(SearchSpace((entry,), {}), ctx, Prior(None), lambda told: 0.0, 0)
    region.look()
    found = region.left_out()
    assert set(found) == {f"block_size={choice}" for choice in entry.knob.choices}
    assert all("max-num-batched-tokens below max-num-seqs" in why for why in found.values())


def test_a_value_that_matters_beside_the_best_point_is_kept():
    def course(arguments):
        # The budget matters only with the largest blocks, of which the most is foretold.
        small = arguments.get("block-size") != 256
        return key_of({**arguments, "max-num-batched-tokens": 0} if small else arguments)

    assert region_of(told_by(lambda at: at["block_size"], course)).left_out() == {}


def test_the_simplest_of_equal_points_stands_for_them_whenever_it_is_found():
    def course(arguments):
        return key_of({k: v for k, v in arguments.items() if k != "watermark"})

    region = region_of(told_by(lambda at: at["block_size"], course), WIDE)
    assert len(region.points) > 50
    assert not any(
        "watermark" in one.stack.arguments for one in region.points if _has_twin(region, one)
    )


def test_of_equal_points_those_that_take_less_memory_stand_for_the_others():
    ctx = on_cpu(
        engine=WITH_PLUGIN,
        fingerprint=workload(reuse={128: 0.5}),
        base_arguments={"kv-cache-memory-bytes": "512M"},
    )
    (entry,) = [k for k in build_space(ctx, harm=Harm.LOSSLESS).knobs if k.knob.name == KNOB]
    _, smaller, larger = entry.knob.choices
    prior = Prior(lambda arguments: Foretold({"score": 0.0}, HOST_BYTES in arguments))
    region = Region(SearchSpace((entry,), {}), ctx, prior, lambda told: told.figures["score"], 0)
    region.include({HOST_BYTES: larger})
    region.look()
    assert [one.stack.arguments for one in region.points] == [{HOST_BYTES: smaller}, {}]


def _has_twin(region, one):
    simpler = {k: v for k, v in one.stack.arguments.items() if k != "watermark"}
    return region.row_of(simpler) is not None


def test_nothing_is_merged_without_a_simulation():
    region = region_of()
    assert len(region.points) == 5 * 8 * 4
    assert region.left_out() == {}
    assert region.row_of({"max-num-seqs": 5}) is None


def test_of_a_large_space_a_budget_of_simulations_finds_the_best_foretold():
    def score(at):
        return -sum((at[name] - 0.5) ** 2 for name in (*SMALL, "watermark"))

    foretell = told_by(score)
    region = region_of(foretell, WIDE)
    assert len(foretell.asked) <= FORETOLD_FIRST
    found = max(foretell(one.stack.arguments).figures["score"] for one in region.points)
    # Five values have one in the middle; of eight and of four the nearest is off by 1/14 and 1/6.
    assert found == pytest.approx(-((1 / 14) ** 2 + (1 / 6) ** 2))
    far = [one for one in region.points if len(one.stack.arguments) > 2]
    assert len(far) > 20


def test_a_large_space_without_a_simulation_is_drawn_and_grows_around_points():
    region = region_of(space=WIDE)
    assert len(region.points) == DRAWN
    region.grow([DRAWN - 1])
    assert DRAWN < len(region.points) <= DRAWN + GROWN
    centre = region.points[DRAWN - 1].values
    for one in region.points[DRAWN:]:
        assert sum(one.values[name] != centre[name] for name in centre) == 1
    for row in range(len(region.points)):
        assert region.row_of(region.points[row].stack.arguments) == row


def test_equal_seeds_look_at_the_same_points():
    first, second = region_of(space=WIDE), region_of(space=WIDE)
    other = region_of(space=WIDE, seed=1)
    keys = [[one.key for one in region.points] for region in (first, second, other)]
    assert keys[0] == keys[1] != keys[2]


def test_what_lies_outside_of_the_space_is_like_points_with_equal_knobs_but_not_the_same():
    region = region_of()
    outside = [{"kv-cache-dtype": "fp8", "block-size": 32}, {"kv-cache-dtype": "fp8"}]
    places, ordered = region.places(outside)
    count = len(region.points)
    assert places.shape == (count + 2, len(SPACE.knobs) + 1)
    assert ordered == [True] * 3 + [False]
    twin = region.row_of({"block-size": 32})
    assert np.array_equal(places[count, :-1], places[twin, :-1])
    assert places[count, -1] == places[count + 1, -1] != places[twin, -1]
    field, knobs = region.field(outside), len(ordered)
    lengths, smooth = np.full((1, knobs), USUAL_AT), np.array([ROUGH])
    _, joint = field.alike(lengths, smooth, np.array([count]), np.array([twin]))
    assert 0 < joint[0, 0, 0] < 1
