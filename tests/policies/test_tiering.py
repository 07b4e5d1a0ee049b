"""Who leaves a full tier, and what is worth loading, against the rules written down another way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.tiering import (
    Adaptive,
    Instance,
    LeastRecent,
    Plan,
    Speeds,
    break_even_bytes_per_s,
    choose_instance,
    matched_blocks,
    plan_loading,
    replay,
)

REQUESTS = st.lists(st.integers(0, 12), max_size=120)
BLOCK_8B_BYTES = 512 * 131_072


def lru_hits(requests, capacity):
    held, hits = [], 0
    for key in requests:
        if key in held:
            hits += 1
            held.remove(key)
        held = [*held, key][-capacity:]
    return hits


def arc_hits(requests, capacity):
    """Figure 4 of the ARC paper, on lists whose first element is the least recent."""
    once, often, ghost_once, ghost_often = [], [], [], []
    target, hits = 0.0, 0

    def replace(key):
        if once and ((key in ghost_often and len(once) == target) or len(once) > target):
            ghost_once.append(once.pop(0))
        else:
            ghost_often.append(often.pop(0))

    for key in requests:
        if key in once or key in often:
            hits += 1
            (once if key in once else often).remove(key)
            often.append(key)
        elif key in ghost_once:
            target = min(capacity, target + max(len(ghost_often) / len(ghost_once), 1))
            replace(key)
            ghost_once.remove(key)
            often.append(key)
        elif key in ghost_often:
            target = max(0, target - max(len(ghost_once) / len(ghost_often), 1))
            replace(key)
            ghost_often.remove(key)
            often.append(key)
        else:
            if len(once) + len(ghost_once) == capacity:
                if len(once) < capacity:
                    ghost_once.pop(0)
                    replace(key)
                else:
                    once.pop(0)
            else:
                total = len(once) + len(often) + len(ghost_once) + len(ghost_often)
                if total >= capacity:
                    if total == 2 * capacity:
                        ghost_often.pop(0)
                    replace(key)
            once.append(key)
    return hits


@given(REQUESTS, st.integers(1, 8))
def test_lru_hits_what_a_list_of_the_latest_hits(requests, capacity):
    hits = replay(requests, capacity, LeastRecent()) * len(requests)
    assert round(hits) == lru_hits(requests, capacity)


@given(REQUESTS, st.integers(1, 8))
def test_arc_hits_what_the_papers_figure_hits(requests, capacity):
    hits = replay(requests, capacity, Adaptive()) * len(requests)
    assert round(hits) == arc_hits(requests, capacity)


@given(REQUESTS)
def test_lru_hits_never_fall_with_capacity(requests):
    rates = [replay(requests, capacity, LeastRecent()) for capacity in range(1, 14)]
    assert rates == sorted(rates)


@pytest.mark.parametrize("order", [LeastRecent, Adaptive])
def test_without_capacity_nothing_is_found(order):
    assert replay([1, 1, 2, 1, 1], 0, order()) == 0


def test_arc_keeps_what_comes_back_through_a_scan():
    hot, requests, next_cold = list(range(8)), [], 100
    for _ in range(30):
        requests += hot + hot + list(range(next_cold, next_cold + 16))
        next_cold += 16
    assert replay(requests, 12, Adaptive()) > replay(requests, 12, LeastRecent()) + 0.1


def test_a_missing_block_ends_the_match():
    assert matched_blocks([1, 2, 3], {1, 3}) == 1
    assert matched_blocks([], {1}) == 0


def test_two_trace_rows_that_share_12_blocks_can_reuse_6144_tokens():
    shared = list(range(46, 58))
    first, second = [*shared, 2353, 2354], [*shared, 2366]
    assert matched_blocks(second, set(first)) * 512 == 6144


def test_an_8b_model_at_40_us_a_token_breaks_even_at_3_28_gb_a_second():
    assert break_even_bytes_per_s(131_072, 40e-6) == pytest.approx(3.2768e9)


@pytest.mark.parametrize(("bytes_per_s", "blocks"), [(25e9, 4), (2e9, 0), (3.3e9, 4), (3.27e9, 0)])
def test_blocks_are_loaded_only_through_a_link_that_beats_computing(bytes_per_s, blocks):
    plan = plan_loading(
        ["host"] * 4,
        prompt_tokens=4 * 512 + 100,
        block_tokens=512,
        block_bytes=BLOCK_8B_BYTES,
        speeds=Speeds({"host": bytes_per_s}, 40e-6),
    )
    assert plan.blocks == blocks
    load_s = blocks * BLOCK_8B_BYTES / bytes_per_s
    assert plan.ready_s == pytest.approx(load_s + (4 * 512 + 100 - blocks * 512) * 40e-6)


def test_loading_is_7_6_times_as_fast_as_computing_at_25_gb_a_second():
    sizes = {"prompt_tokens": 4 * 512, "block_tokens": 512, "block_bytes": BLOCK_8B_BYTES}
    speeds = Speeds({"host": 25e9}, 40e-6)
    loaded = plan_loading(["host"] * 4, **sizes, speeds=speeds)
    computed = plan_loading([], **sizes, speeds=speeds)
    assert computed.ready_s / loaded.ready_s == pytest.approx(7.63, abs=0.01)


@given(
    st.lists(st.sampled_from(["host", "disk"]), max_size=7),
    st.integers(0, 30),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_no_other_number_of_blocks_is_ready_sooner(found, rest, host, disk):
    speeds = Speeds({"host": host, "disk": disk}, 0.5)
    tokens = 4 * len(found) + rest
    plan = plan_loading(found, prompt_tokens=tokens, block_tokens=4, block_bytes=3, speeds=speeds)
    ready = [
        sum(3 / speeds.bytes_per_s[tier] for tier in found[:count]) + 0.5 * (tokens - 4 * count)
        for count in range(len(found) + 1)
    ]
    assert plan.ready_s == pytest.approx(min(ready))
    assert plan.ready_s == pytest.approx(ready[plan.blocks])


def test_a_slow_block_is_loaded_if_fast_ones_behind_it_pay_for_it():
    speeds = Speeds({"host": 100.0, "disk": 1.0}, 1.0)
    sizes = {"prompt_tokens": 40, "block_tokens": 4, "block_bytes": 6, "speeds": speeds}
    assert plan_loading(["disk"], **sizes).blocks == 0
    assert plan_loading(["disk", "host"], **sizes).blocks == 2


def test_the_instance_that_answers_first_takes_the_request():
    idle = Instance("idle", 0.0, Plan(0, 5.0))
    warm = Instance("warm", 2.0, Plan(4, 1.0))
    busy = Instance("busy", 9.0, Plan(9, 0.1))
    assert choose_instance([busy, idle, warm]) is warm
    assert choose_instance([idle, warm], limit_s=3.0) is warm
    assert choose_instance([idle, warm], limit_s=2.9) is None
    assert choose_instance([]) is None
    assert choose_instance([warm, Instance("later", 1.0, Plan(1, 2.0))]) is warm


def test_an_object_that_is_gone_does_not_leave_again():
    for order in (LeastRecent(), Adaptive()):
        for key in (1, 2, 3):
            order.admit(key)
        order.hit(1)
        order.forget(2)
        assert {order.evict(9), order.evict(9)} == {1, 3}
        assert len(order) == 0


def test_arc_survives_objects_of_any_size():
    chance = random.Random(3)
    order, inside = Adaptive(), set()
    for _ in range(3000):
        key = chance.randrange(40)
        if key in inside:
            order.hit(key)
            continue
        order.miss(key)
        for _ in range(chance.randrange(4)):
            if inside:
                inside.remove(order.evict(key))
        order.admit(key)
        inside.add(key)
        assert len(order) == len(inside)
