"""Races of a trial with the best one so far, request by request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.fidelity import Missed, Race, gain_of, pace_of
from kvtune.profilers.goal import slo_attained
from kvtune.profilers.metrics.base import measure
from kvtune.types import Goal, LoadRun, RequestRecord, Slo

FREE = Goal()
LIMITED = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
TOKENS = Goal(objective="throughput")


def record(index, end_s, *, ttft_s=0.1, sent_s=None, error=None, output=4, asked=4):
    sent_s = max(0.0, end_s - 4.0) if sent_s is None else sent_s
    first_s = None if error else sent_s + ttft_s
    return RequestRecord(index, sent_s, sent_s, first_s, end_s, (), 8, output, asked, error=error)


def steady(each_s, count=40, **about):
    """One request ends every `each_s`; four or so are in flight."""
    return [
        record(index, (index + 1) * each_s, sent_s=max(0.0, (index - 3) * each_s), **about)
        for index in range(count)
    ]


def best(each_s=1.0, goal=FREE, **about):
    return pace_of(3, [steady(each_s, **about)], goal)


def run(race, records, tick_s=0.25):
    """Let a race see records as a load client shows them; how many it saw, and why no more."""
    left = sorted(records, key=lambda one: one.end_s)
    now_s = 0.0
    while left:
        now_s += tick_s
        while left and left[0].end_s <= now_s:
            race.saw(left.pop(0))
        if reason := race.verdict(now_s):
            return race.ended, reason
    return race.ended, None


def test_a_pace_is_the_mean_over_repeats():
    pace = pace_of(3, [steady(1.0, 4), steady(3.0, 4)], FREE)
    assert pace.ended_s == (2.0, 4.0, 6.0, 8.0)
    assert pace.gained == (1.0, 2.0, 3.0, 4.0)
    assert pace.rate == 0.5
    assert pace.in_flight == 4


def test_a_run_without_anything_good_is_no_pace():
    assert pace_of(3, [], FREE) is None
    assert pace_of(3, [[]], FREE) is None
    assert pace_of(3, [steady(1.0, ttft_s=2.0)], LIMITED) is None


def test_what_counts_is_what_the_objective_counts():
    assert gain_of(record(0, 1.0), LIMITED) == 1
    assert gain_of(record(0, 1.0, ttft_s=2.0), LIMITED) == 0
    assert gain_of(record(0, 1.0, error="HTTP 500"), FREE) == 0
    assert gain_of(record(0, 1.0, output=7), TOKENS) == 7
    assert gain_of(record(0, 1.0, output=7, error="HTTP 500"), TOKENS) == 0


def test_a_trial_far_behind_is_cut_at_the_second_checkpoint():
    ended, reason = run(Race(best(), FREE), steady(2.0))
    # Of 40 requests, 30% are the 12th and 45% the 18th; it is at half the pace:
    # 0.5 exp(2.33 x 0.08 / sqrt(0.45)) = 0.66.
    assert ended == 18
    assert reason == "cut after 45% of its requests: at most 0.66x of trial 3"


def test_one_checkpoint_behind_is_not_enough():
    # Behind with 12 in 22.75 s, and with 18 in 24.25 s not by more than noise can explain.
    slow_start = [record(index, 20.0 + index / 4) for index in range(40)]
    assert run(Race(best(), FREE), slow_start) == (40, None)


def test_a_trial_that_keeps_up_runs_to_its_end():
    assert run(Race(best(), FREE), steady(1.1)) == (40, None)
    assert run(Race(best(), FREE), steady(0.5)) == (40, None)


def test_requests_that_miss_the_limits_do_not_count():
    ended, reason = run(Race(best(goal=LIMITED), LIMITED), steady(1.0, ttft_s=2.0))
    assert ended < 40
    assert "of trial 3" in reason


def test_a_server_that_completes_nothing_is_cut_when_nothing_could_save_it():
    race = Race(best(), FREE)
    # All 40 at once would be 0.8 of the best's 1 a second until 50 s.
    assert race.verdict(49.9) is None
    assert race.verdict(50.1) == "cut after 0% of its requests: at most 0.80x of trial 3"


def test_tokens_that_are_still_to_come_count_as_much_as_was_asked_for():
    race = Race(best(goal=TOKENS, output=4, asked=8), TOKENS)
    assert race.verdict(99.0) is None, "320 tokens could come, at 4 a second"
    assert race.verdict(101.0) is not None


def test_nothing_is_said_before_as_many_ended_as_are_in_flight():
    crowd = [record(index, 10.0 + index, sent_s=0.0) for index in range(20)]
    crowd += [record(20 + index, 30.0 + index, sent_s=10.0 + index) for index in range(20)]
    pace = pace_of(3, [crowd], FREE)
    assert pace.in_flight == 20
    ended, _ = run(Race(pace, FREE), [record(one.index, 1.4 * one.end_s) for one in crowd])
    # 30% and 45% are the 12th and 18th, too early; 60% is the first and 80% the second.
    assert ended == 32


def test_a_run_that_is_complete_is_not_cut():
    race = Race(best(), FREE)
    for one in steady(1.0):
        race.saw(one)
    assert race.verdict(1000.0) is None


@given(
    factor=st.floats(0.95, 3.0),
    each_s=st.floats(0.01, 5.0),
    noise=st.lists(st.floats(-0.1, 0.1), min_size=40, max_size=40),
)
def test_what_is_as_good_at_every_moment_is_never_cut(factor, each_s, noise):
    race = Race(best(each_s), FREE)
    records = [
        record(index, (index + 1 + off) * each_s / factor) for index, off in enumerate(noise)
    ]
    assert run(race, records, tick_s=each_s) == (40, None)


@given(factor=st.floats(0.05, 0.75), each_s=st.floats(0.01, 5.0))
def test_what_is_far_behind_at_every_moment_is_always_cut(factor, each_s):
    ended, reason = run(Race(best(each_s), FREE), steady(each_s / factor), tick_s=each_s)
    assert ended < 40
    most = float(reason.split("at most ")[1].split("x")[0])
    assert most < 0.97
    assert most >= factor - 0.05


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_noisier_the_measurements_the_longer_it_takes(noise):
    ended, _ = run(Race(best(), FREE, noise), steady(1.5))
    assert ended == 18 if noise == 0.0 else ended > 18
    assert math.isfinite(ended)


@pytest.mark.parametrize("statistic", ["p50", "p95", "p99", "max"])
@given(st.lists(st.sampled_from([0.5, 2.0]), min_size=1, max_size=60))
def test_a_run_is_not_over_before_its_limit_is_surely_missed(statistic, waits_s):
    """Of waits that all are either far below or far above the limit, the whole run tells."""
    slo = Slo(metric="ttft", statistic=statistic, limit_s=1.0)
    goal = Goal(slos=(slo,))
    records = [record(n, n + 5.0, ttft_s=wait_s) for n, wait_s in enumerate(waits_s)]
    missed = Missed(goal, len(records))
    seen = []
    for one in records:
        missed.saw(one)
        seen.append(missed.verdict(one.end_s) is not None)
    if seen[-1]:
        run = LoadRun(tuple(records), 100.0, 0.0, {}, {})
        assert slo_attained(slo, measure(run, goal)) is False
        rest = [record(n, n + 5.0) for n in range(len(records))][seen.index(True) + 1 :]
        lucky = (*records[: seen.index(True) + 1], *rest)
        run = LoadRun(lucky, 100.0, 0.0, {}, {})
        assert slo_attained(slo, measure(run, goal)) is False, "the rest cannot save it"
        assert "is missed whatever becomes of the rest" in missed.reason


def test_two_of_forty_may_be_late_and_a_third_is_too_many():
    missed = Missed(LIMITED, 40)
    for index in range(2):
        missed.saw(record(index, 5.0, ttft_s=2.0))
        assert missed.verdict(5.0) is None
    missed.saw(record(2, 5.0, ttft_s=2.0))
    assert missed.verdict(5.0) == "p95 ttft <= 1s is missed whatever becomes of the rest"


@pytest.mark.parametrize(("metric", "statistic"), [("itl", "p95"), ("ttft", "mean")])
def test_limits_that_the_rest_may_still_keep_end_nothing(metric, statistic):
    missed = Missed(Goal(slos=(Slo(metric=metric, statistic=statistic, limit_s=0.01),)), 3)
    for index in range(3):
        missed.saw(record(index, 5.0, ttft_s=2.0))
    assert missed.verdict(5.0) is None


def test_requests_that_failed_are_not_late():
    missed = Missed(LIMITED, 1)
    missed.saw(record(0, 5.0, error="HTTP 500"))
    assert missed.verdict(5.0) is None
