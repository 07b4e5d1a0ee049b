import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadGoal
from kvtune.profilers.goal import (
    goal_met,
    goal_text,
    goal_violations,
    parse_goal,
    parse_slo,
    slo_attained,
    slo_key,
    slo_text,
)
from kvtune.types import Goal, Slo


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "limit_s"),
    [
        ("p95 ttft <= 800ms", "ttft", "p95", 0.8),
        ("p99 itl<=80 ms", "itl", "p99", 0.08),
        ("mean tpot <= 0.05s", "tpot", "mean", 0.05),
        ("max e2e <= 30s", "e2e", "max", 30.0),
        ("ttft p95 < 1.5 s", "ttft", "p95", 1.5),
        ("median e2el <= 2m", "e2e", "p50", 120.0),
        ("P99.90 ITL < 500us", "itl", "p99.9", 0.0005),
        ("p50 ttft <= .25s", "ttft", "p50", 0.25),
    ],
)
def test_limit_is_read(text, metric, statistic, limit_s):
    assert parse_slo(text) == Slo(metric=metric, statistic=statistic, limit_s=limit_s)


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("p95 ttft <= 800", "no unit", '"800ms"'),
        ("p95 tttf <= 8s", "unknown metric 'tttf'", "did you mean 'ttft'"),
        ("p0 ttft <= 1s", "unknown statistic 'p0'", "p1 to p99"),
        ("p995 ttft <= 1s", "unknown statistic", "p1 to p99"),
        ("p95 ttft >= 8s", "upper bound", '"<="'),
        ("p95 ttft <= 800msec", "unknown unit 'msec'", "us, ms, s, m"),
        ("p95 ttft <= 0ms", "positive", "p95 ttft"),
        ("p95 ttft <= -3ms", "not a limit", "p95 ttft"),
        ("p95 ttft <= 95%", "unknown unit '%'", "ms"),
        ("fast please", "not a limit", "p95 ttft"),
    ],
)
def test_bad_limit_is_refused_with_the_fix(text, message, fix):
    with pytest.raises(BadGoal) as caught:
        parse_slo(text)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_whole_dial_is_read():
    goal = parse_goal("max goodput where p95 ttft <= 500ms and p95 itl <= 80ms")
    assert goal == Goal(
        objective="goodput",
        slos=(
            Slo(metric="ttft", statistic="p95", limit_s=0.5),
            Slo(metric="itl", statistic="p95", limit_s=0.08),
        ),
    )
    assert parse_goal("max throughput") == Goal(objective="throughput")
    assert parse_goal([]) == Goal()


def test_limits_are_read_without_an_objective():
    goal = parse_goal(["p95 ttft <= 1s", "max e2e <= 30s, mean itl <= 50ms"])
    assert goal.objective == "goodput"
    assert [slo_key(slo) for slo in goal.slos] == ["ttft_p95_s", "e2e_max_s", "itl_mean_s"]
    assert parse_goal("max e2e <= 30s").slos == (Slo(metric="e2e", statistic="max", limit_s=30),)


def test_repeated_limit_counts_once():
    assert len(parse_goal(["p95 ttft <= 1s", "p95 ttft <= 1000ms"]).slos) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max goodputt where p95 ttft <= 1s", "unknown objective 'goodputt'"),
        ("max goodput where", "not a limit"),
        ("", "not a limit"),
        (["p95 ttft <= 1s", "p95 ttft <= 2s"], "two limits for p95 ttft"),
        (["max goodput", "max throughput"], "two objectives"),
    ],
)
def test_bad_goal_is_refused(text, message):
    with pytest.raises(BadGoal, match=message):
        parse_goal(text)


slos = st.builds(
    Slo,
    metric=st.sampled_from(["ttft", "itl", "tpot", "e2e"]),
    statistic=st.sampled_from(["p1", "p50", "p95", "p99", "p99.9", "mean", "max"]),
    limit_s=st.floats(1e-9, 1e6, allow_nan=False),
)


@given(st.sampled_from(["goodput", "throughput"]), st.lists(slos, max_size=4, unique_by=slo_key))
def test_goal_survives_being_written_and_read(objective, limits):
    goal = Goal(objective=objective, slos=tuple(limits))
    assert parse_goal(goal_text(goal)) == goal


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_with_a_fix(text):
    goal, fix = None, ""
    try:
        goal = parse_goal(text)
    except BadGoal as error:
        fix = error.fix
    assert fix or parse_goal(goal_text(goal)) == goal


def test_limit_is_met_missed_or_unknown():
    goal = parse_goal("p95 ttft <= 500ms and p99 itl <= 80ms and mean tpot <= 1s")
    metrics = {"ttft_p95_s": 0.5, "itl_p99_s": 0.1}
    ttft, itl, tpot = goal.slos
    assert slo_attained(ttft, metrics) is True
    assert slo_attained(itl, metrics) is False
    assert slo_attained(tpot, metrics) is None
    assert goal_met(goal, metrics) == {
        "p95 ttft <= 500ms": True,
        "p99 itl <= 80ms": False,
        "mean tpot <= 1s": None,
    }
    violations = goal_violations(goal, metrics)
    assert violations[slo_text(ttft)] == pytest.approx(0)
    assert violations[slo_text(itl)] == pytest.approx(0.25)
    assert violations[slo_text(tpot)] is None
