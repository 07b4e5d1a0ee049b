import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.goal import parse_goal
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.metrics.goodput import is_good
from kvtune.types import LoadRun, RequestRecord


def record(first=0.25, gaps=(0.0625, 0.0625, 0.0625, 0.4375), error=None):
    return RequestRecord(
        index=0,
        scheduled_s=0.0,
        sent_s=0.0,
        first_token_s=first,
        end_s=first + sum(gaps),
        gaps_s=tuple(gaps),
        input_tokens=8,
        output_tokens=len(gaps) + 1,
        requested_output_tokens=None,
        error=error,
    )


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        ("p95 ttft <= 250ms", True),  # one value: every statistic is that value
        ("max ttft <= 249ms", False),
        ("p50 itl <= 62.5ms", True),  # the statistic over the request's own gaps
        ("max itl <= 400ms", False),
        ("mean itl <= 156.25ms", True),
        ("p95 tpot <= 156.25ms", True),  # 0.625 s over four gaps
        ("p95 tpot <= 156ms", False),
        ("max e2e <= 0.875s", True),
        ("p95 ttft <= 250ms and max itl <= 400ms", False),
        ("max goodput", True),
    ],
)
def test_request_is_good_by_its_own_values(goal, good):
    assert is_good(record(), parse_goal(goal)) is good


def test_failed_request_is_never_good():
    assert not is_good(record(error="reset"), parse_goal("max goodput"))


def test_request_with_one_token_cannot_miss_a_limit_on_gaps():
    single = record(gaps=())
    assert is_good(single, parse_goal("p95 itl <= 1us and mean tpot <= 1us"))
    assert not is_good(single, parse_goal("p95 itl <= 1us and p95 ttft <= 1us"))


def test_goodput_is_good_requests_over_the_duration():
    run = LoadRun(
        records=(record(), record(first=3.0), record(error="reset")),
        duration_s=4.0,
        client_cpu_s=0.0,
        counters={},
        gauges={},
    )
    figures = measure(run, parse_goal("p95 ttft <= 1s"))
    assert figures["goodput_requests_per_s"] == pytest.approx(1 / 4)
    assert figures["good_share_ratio"] == pytest.approx(1 / 3)


@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=10),
    st.floats(0.001, 10),
    st.floats(0, 5),
)
def test_looser_limit_never_makes_a_good_request_bad(gaps, limit_s, slack_s):
    request = record(gaps=gaps)
    if is_good(request, parse_goal(f"p95 itl <= {limit_s:.6f}s and p95 ttft <= 1s")):
        assert is_good(request, parse_goal(f"p95 itl <= {limit_s + slack_s:.6f}s"))
