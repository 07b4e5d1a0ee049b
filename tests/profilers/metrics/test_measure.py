import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import NotFound
from kvtune.profilers.goal import parse_goal, slo_key
from kvtune.profilers.metrics.base import LatencyMetric, measure, metric_of, metrics
from kvtune.types import Goal, LoadRun, RequestRecord


def record(index=0, *, sent=0.0, first=1.0, gaps=(0.1, 0.3), tokens=None, error=None, inputs=10):
    """A request sent at `sent` whose tokens come `first` seconds later, then at the gaps."""
    start = None if first is None else sent + first
    return RequestRecord(
        index=index,
        scheduled_s=sent,
        sent_s=sent,
        first_token_s=start,
        end_s=sent + (first or 0.0) + sum(gaps),
        gaps_s=tuple(gaps),
        input_tokens=inputs,
        output_tokens=len(gaps) + 1 if tokens is None else tokens,
        requested_output_tokens=None,
        error=error,
    )


def run_of(*records, duration=10.0, cpu=0.5):
    return LoadRun(
        records=tuple(records), duration_s=duration, client_cpu_s=cpu, counters={}, gauges={}
    )


def test_known_run_gives_known_figures():
    run = run_of(
        record(0, first=1.0, gaps=(0.1, 0.3)),
        record(1, sent=2.0, first=3.0, gaps=(0.2, 0.2, 0.2, 0.6)),
        duration=8.0,
        cpu=0.4,
    )
    figures = measure(run, Goal())
    expected = {
        "ttft_p50_s": 2.0,
        "ttft_p95_s": 1.0 + 0.95 * 2.0,
        "ttft_mean_s": 2.0,
        "ttft_max_s": 3.0,
        "itl_p50_s": 0.2,  # pooled: .1 .2 .2 .2 .3 .6
        "itl_mean_s": 1.6 / 6,
        "itl_max_s": 0.6,
        "tpot_p50_s": (0.2 + 0.3) / 2,  # each request weighs the same
        "e2e_max_s": 4.2,
        "e2e_mean_s": (1.4 + 4.2) / 2,
        "output_tokens_per_s": 1.0,
        "input_tokens_per_s": 2.5,
        "requests_per_s": 0.25,
        "goodput_requests_per_s": 0.25,
        "good_share_ratio": 1.0,
        "failed_requests": 0,
        "client_cpu_s_per_request": 0.2,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_statistics_that_the_goal_asks_for_are_reported():
    goal = parse_goal("p90 ttft <= 1s and p99.9 itl <= 1s and p95 ttft <= 2s")
    figures = measure(run_of(record()), goal)
    assert all(slo_key(slo) in figures for slo in goal.slos)
    assert "ttft_p90_s" not in measure(run_of(record()), Goal())


def test_failed_requests_have_no_latency_but_are_counted():
    run = run_of(record(0), record(1, first=9.0, gaps=(9.0,), error="timed out"))
    figures = measure(run, Goal())
    assert figures["failed_requests"] == 1
    assert figures["ttft_max_s"] == pytest.approx(1.0)
    assert figures["requests_per_s"] == pytest.approx(0.1)
    assert figures["good_share_ratio"] == pytest.approx(0.5)


def test_what_is_not_known_is_absent_and_never_zero():
    assert measure(run_of(), Goal()) == {}
    unknown_length = measure(run_of(record(0), record(1, inputs=None)), Goal())
    assert "input_tokens_per_s" not in unknown_length
    one_token = measure(run_of(record(gaps=())), Goal())
    assert not any(name.startswith(("itl", "tpot")) for name in one_token)
    all_failed = measure(run_of(record(first=None, gaps=(), error="refused")), Goal())
    assert not any(name.startswith(("ttft", "itl", "tpot", "e2e")) for name in all_failed)
    assert all_failed["requests_per_s"] == 0
    assert "requests_per_s" not in measure(run_of(record(), duration=0.0), Goal())


def test_every_metric_says_its_unit_and_direction():
    names = {"ttft", "itl", "tpot", "e2e", "goodput_requests_per_s", "output_tokens_per_s"}
    assert names <= set(metrics())
    for metric in metrics().values():
        assert metric.unit
        assert metric.better in ("higher", "lower")


def test_flat_name_leads_to_its_metric():
    figures = measure(run_of(record()), parse_goal("p99.9 ttft <= 1s"))
    for name in figures:
        assert metric_of(name).name == name or issubclass(metric_of(name), LatencyMetric)
    assert metric_of("ttft_p99.9_s").name == "ttft"
    with pytest.raises(NotFound, match="goodputs"):
        metric_of("goodputs")


times = st.floats(0.0, 100.0, allow_nan=False)
records = st.builds(
    record,
    sent=times,
    first=st.one_of(st.none(), times),
    gaps=st.lists(times, max_size=6),
    error=st.sampled_from([None, None, "boom"]),
)


@given(st.lists(records, max_size=8))
def test_figures_are_finite_and_ordered(made):
    figures = measure(run_of(*made), parse_goal("p95 ttft <= 5s and p95 itl <= 1s"))
    assert all(math.isfinite(value) and value >= -1e-9 for value in figures.values())
    for name in ("ttft", "itl", "tpot", "e2e"):
        if f"{name}_p50_s" in figures:
            parts = [figures[f"{name}_{statistic}_s"] for statistic in ("p50", "p95", "p99", "max")]
            assert parts == sorted(parts)
    if made:
        assert figures["goodput_requests_per_s"] <= figures["requests_per_s"]
