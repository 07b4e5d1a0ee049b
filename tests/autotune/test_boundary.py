"""Which loads are tried for the highest one that holds, and where the boundary is said to be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.boundary import (
    at_load,
    boundary_of,
    check_boundary,
    ladder_of,
    next_load,
    violation_of,
)
from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Goal, Request, Slo

CLOSED = LoadPlan(ClosedLoop(16), at_boundary=True)
OPEN = LoadPlan(OpenLoop(), at_boundary=True)
GOAL = Goal(
    slos=(
        Slo(metric="ttft", statistic="p95", limit_s=1.0),
        Slo(metric="itl", statistic="p95", limit_s=0.1),
    )
)


def load_of(count, every_s=0.5):
    return [
        Request(input_tokens=8, output_tokens=4, arrival_s=number * every_s)
        for number in range(count)
    ]


def climbed(ladder, start, holds, gives_up=False):
    """All loads that are tried of a server that holds up to some load, with whether they held."""
    held = {}
    while (load := next_load(ladder, start, held, gives_up=gives_up)) is not None:
        assert load not in held, "a load is tried once"
        assert ladder.loads[0] <= load <= ladder.loads[-1]
        held[load] = holds(load)
        assert len(held) < 20
    return held


def bracket(held):
    low = max((load for load, ok in held.items() if ok), default=None)
    return low, min((load for load, ok in held.items() if not ok), default=None)


def test_steps_of_the_ladder_grow_by_a_quarter_and_end_where_requests_are_too_few():
    ladder = ladder_of(CLOSED, load_of(48))
    assert ladder.loads == (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 19, 24)
    assert ladder.start == 16
    assert ladder_of(CLOSED, load_of(6)).loads == (1, 2, 3)
    assert ladder_of(CLOSED, load_of(6)).start == 3
    assert ladder_of(CLOSED, load_of(1)).loads == (1,)


def test_rates_are_steps_around_the_workloads_own():
    ladder = ladder_of(OPEN, load_of(40, every_s=0.5))
    assert ladder.start == pytest.approx(2.0)
    assert ladder.loads[0] == pytest.approx(2 / 8, rel=0.25)
    assert ladder.loads[-1] == pytest.approx(2 * 64, rel=0.25)
    assert all(
        after / before == pytest.approx(1.25)
        for before, after in zip(ladder.loads, ladder.loads[1:], strict=False)
    )
    twice = LoadPlan(OpenLoop(time_scale=0.5), at_boundary=True)
    assert ladder_of(twice, load_of(40)).start == pytest.approx(4.0)
    assert set(ladder_of(twice, load_of(40)).loads) & set(ladder.loads), (
        "steps are the same for all"
    )


def test_a_load_is_sent_by_as_many_requests_as_it_needs():
    plan, sent = at_load(CLOSED, load_of(100), 12.0)
    assert plan.arrivals == ClosedLoop(12)
    assert len(sent) == 36
    assert not plan.at_boundary
    assert len(at_load(CLOSED, load_of(100), 2.0)[1]) == 24
    assert len(at_load(CLOSED, load_of(30), 15.0)[1]) == 30


def test_a_rate_is_made_by_scaling_the_times_and_takes_no_longer_than_the_workload():
    requests = load_of(97, every_s=0.5)
    plan, sent = at_load(OPEN, requests, 4.0)
    assert plan.arrivals.time_scale == pytest.approx(0.5)
    assert len(sent) == 97
    plan, sent = at_load(OPEN, requests, 1.0)
    assert plan.arrivals.time_scale == pytest.approx(2.0)
    assert len(sent) == 49
    limited = LoadPlan(OpenLoop(max_concurrency=5), at_boundary=True)
    assert at_load(limited, requests, 1.0)[0].arrivals.max_concurrency == 5


def test_a_burst_at_the_beginning_is_sent_at_every_rate_with_what_comes_after_it():
    burst = [Request(input_tokens=8, output_tokens=4, arrival_s=0.0) for _ in range(30)]
    later = [Request(input_tokens=8, output_tokens=4, arrival_s=10.0 + n) for n in range(60)]
    check_boundary(OPEN, requests := burst + later, GOAL)
    sent = [at_load(OPEN, requests, load) for load in ladder_of(OPEN, requests).loads]
    assert len(sent[0][1]) == 31
    # Thirty gaps in the ten seconds until the first that comes later: three requests a second.
    lowest = ladder_of(OPEN, requests).loads[0]
    assert sent[0][0].arrivals.time_scale == pytest.approx(3.0 / lowest)


@pytest.mark.parametrize("plan", [CLOSED, OPEN])
@given(st.floats(0.3, 200.0), st.floats(0.3, 60.0))
def test_the_boundary_of_any_server_is_found_closely_and_in_few_tries(plan, limit, start):
    ladder = ladder_of(plan, load_of(96))
    start = ladder.nearest(start)
    held = climbed(ladder, start, lambda load: load <= limit)
    low, high = bracket(held)
    if limit < ladder.loads[0]:
        assert low is None
        assert ladder.loads[0] in held
    elif limit >= ladder.loads[-1]:
        assert high is None
        assert ladder.loads[-1] in held
    else:
        assert low <= limit < high
        assert high / low <= 1.16 or (ladder.whole and high - low == 1)
    assert len(held) <= 11


@given(st.floats(0.5, 60.0), st.integers(1, 48))
def test_who_does_not_hold_what_the_best_does_gets_one_try_below_it(limit, start):
    ladder = ladder_of(CLOSED, load_of(96))
    held = climbed(ladder, float(start), lambda load: load <= limit, gives_up=True)
    if limit < start:
        assert len(held) <= 2
        assert all(load <= start for load in held)
    else:
        assert held == climbed(ladder, float(start), lambda load: load <= limit)


def test_a_rate_or_a_number_near_the_last_load_is_where_one_begins():
    ladder = ladder_of(CLOSED, load_of(96))
    assert ladder.nearest(13.4) == 13.0
    assert ladder.nearest(500.0) == 48.0
    assert ladder_of(OPEN, load_of(96)).nearest(2.3) == 2.3


def test_the_boundary_lies_where_limits_are_just_met():
    found = boundary_of({8.0: [-1.0], 10.0: [-0.2], 12.0: [0.2], 16.0: [0.5]})
    assert (found.low, found.high) == (10.0, 12.0)
    assert found.load == pytest.approx(math.sqrt(120.0)), "half-way on a logarithmic scale"
    assert not found.is_cliff


def test_repeats_of_a_load_count_together():
    found = boundary_of({8.0: [-1.0, -1.0], 10.0: [-0.5, 0.3], 12.0: [0.1, 0.3]})
    assert (found.low, found.high) == (10.0, 12.0)
    assert boundary_of({8.0: [-1.0], 10.0: [-0.2, 0.3]}).low == 8.0


def test_a_lucky_load_above_the_boundary_pulls_it_up_no_further_than_it_held():
    found = boundary_of({8.0: [-0.5], 10.0: [0.4], 12.0: [-0.1], 15.0: [0.6]})
    assert (found.low, found.high) == (12.0, 15.0)
    assert found.load == 12.0, "10 and 12 together are above their limits"


def test_a_limit_that_is_missed_at_once_by_far_is_a_cliff():
    found = boundary_of({10.0: [-0.3], 12.0: [1.5]})
    assert found.is_cliff
    # A sixth of the way, as 0.3 is of 1.8, in logarithms.
    assert found.load == pytest.approx(10 * 1.2 ** (1 / 6))


def test_a_load_that_was_not_carried_at_all_gives_no_place_in_between():
    found = boundary_of({10.0: [-0.3], 12.0: [math.inf]})
    assert found == (10.0, 12.0, 10.0, True)


def test_nothing_is_said_beyond_what_was_tried():
    assert boundary_of({1.0: [0.4], 2.0: [0.9]}) == (None, 1.0, None, False)
    assert boundary_of({24.0: [-0.4]}) == (24.0, None, 24.0, False)


def test_the_limit_that_is_missed_most_counts():
    assert violation_of(GOAL, {"ttft_p95_s": 0.5, "itl_p95_s": 0.2}) == (
        pytest.approx(math.log(2)),
        "p95 itl <= 100ms",
    )
    by, limit = violation_of(GOAL, {"ttft_p95_s": 0.5, "itl_p95_s": 0.01})
    assert by == pytest.approx(math.log(0.5))
    assert limit == "p95 ttft <= 1s"
    assert violation_of(GOAL, {"ttft_p95_s": 0.5})[0] == math.inf


def test_what_has_no_boundary_is_refused_before_anything_is_started():
    check_boundary(CLOSED, load_of(8), GOAL)
    with pytest.raises(BadInput, match="limits"):
        check_boundary(CLOSED, load_of(8), Goal())
    with pytest.raises(BadInput, match="all arrive at once") as refusal:
        check_boundary(OPEN, load_of(8, every_s=0.0), GOAL)
    assert "--concurrency" in refusal.value.fix
