"""Decisions: noise never wins, harm never wins without need, failure never wins at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.comparing import Value
from kvtune.autotune.decide import Candidate, decide, figures_of, rounds_of
from kvtune.types import (
    Choice,
    Failure,
    FailureClass,
    Goal,
    Harm,
    Measurement,
    Outcome,
    PolicyStack,
    Slo,
    Status,
)

GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))


def stack(harm=Harm.LOSSLESS, **arguments):
    if not arguments:
        return PolicyStack()
    return PolicyStack(choices=(Choice(policy="p", parameters={}, arguments=arguments, harm=harm),))


def measured(goodput, ttft_s=0.5):
    return Measurement(
        status=Status.OK,
        metrics={
            "goodput_requests_per_s": tuple(goodput),
            "ttft_p95_s": (ttft_s,) * len(goodput),
        },
    )


def candidate(number, goodput, *, ttft_s=0.5, harm=Harm.LOSSLESS, **arguments):
    return Candidate(number, stack(harm, **arguments), measured(goodput, ttft_s))


BASELINE = candidate(0, (1.0, 1.1, 0.9))


def test_settings_far_above_the_noise_win():
    decision = decide(GOAL, BASELINE, [candidate(3, (2.0, 2.1, 1.9), a=1)], {})
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended == 3
    assert decision.gain_ratio is not None
    by_round = (2.0 / 1.0) * (2.1 / 1.1) * (1.9 / 0.9)
    assert decision.gain_ratio.estimate == pytest.approx(by_round ** (1 / 3))
    assert decision.gain_ratio.low > 1


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=8),
    st.lists(st.floats(0.001, 9), min_size=2, max_size=8),
)
def test_no_share_is_above_one_and_no_time_below_zero(shares, times):
    """As t intervals of few repeats reach farther than what they are of can."""
    found = Measurement(
        status=Status.OK,
        metrics={"good_share_ratio": tuple(shares), "ttft_p95_s": tuple(times)},
    )
    figures = figures_of(GOAL, found)
    share, time = figures["good_share_ratio"], figures["ttft_p95_s"]
    assert 0 <= share.low <= share.estimate <= share.high <= 1
    assert 0 <= time.low <= time.estimate <= time.high


def test_bounds_of_a_share_end_where_shares_do():
    metrics = {"good_share_ratio": (0.95, 1.0, 1.0)}
    share = figures_of(GOAL, Measurement(status=Status.OK, metrics=metrics))["good_share_ratio"]
    # A mean of 0.9833 with a standard error of 0.01667, and a t quantile of 4.303.
    assert share.low == pytest.approx(0.9116, abs=1e-4)
    assert share.high == 1.0


def test_a_difference_within_the_noise_is_no_winner():
    decision = decide(GOAL, BASELINE, [candidate(3, (1.0, 1.3, 0.9), a=1)], {})
    assert decision.outcome is Outcome.NO_CLEAR_WINNER
    assert decision.recommended == 0, "the simplest of those that tie"
    assert decision.ties == (3,)


def test_settings_that_are_worse_leave_the_defaults():
    decision = decide(GOAL, BASELINE, [candidate(3, (0.2, 0.21, 0.19), a=1)], {})
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert decision.recommended == 0


def test_of_settings_that_tie_the_less_harmful_one_is_recommended():
    fp8 = candidate(4, (2.05, 2.1, 2.0), harm=Harm.NEAR_LOSSLESS, dtype="fp8")
    lossless = candidate(5, (2.0, 2.1, 1.9), a=1, b=2)
    decision = decide(GOAL, BASELINE, [fp8, lossless], {})
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended == 5
    assert decision.ties == (4,)


def test_of_equally_harmless_settings_that_tie_the_simpler_one_is_recommended():
    decision = decide(
        GOAL,
        BASELINE,
        [candidate(4, (2.05, 2.1, 2.0), a=1, b=2), candidate(5, (2, 2.1, 1.9), a=1)],
        {},
    )
    assert decision.recommended == 5


def taking(number, *takes_bytes):
    """A trial far above the defaults, of choices that take so much memory each."""
    choices = (
        Choice(policy=f"p{at}", parameters={}, arguments={f"a{at}": at}, harm=Harm.LOSSLESS)
        for at in range(len(takes_bytes))
    )
    stack = PolicyStack(
        choices=tuple(
            one.model_copy(update={"takes_bytes": taken})
            for one, taken in zip(choices, takes_bytes, strict=True)
        )
    )
    return Candidate(number, stack, measured((2.0, 2.1, 1.9)))


@pytest.mark.parametrize(
    ("found", "number"),
    [
        ([taking(4, 6 << 30), taking(5, 3 << 30)], 5),
        ([taking(4, 3 << 30), taking(5, 0, 0)], 5),
        ([taking(4, 1 << 30, 2 << 30), taking(5, 2 << 30, 2 << 30)], 4),
        ([taking(4, 1 << 30, 1 << 30), taking(5, 2 << 30)], 5),
        ([taking(4, 1 << 30), taking(5, 1 << 30)], 4),
    ],
)
def test_of_settings_that_tie_those_that_take_less_memory_are_recommended(found, number):
    decision = decide(GOAL, BASELINE, found, {})
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended == number
    assert len(decision.ties) == 1


def test_the_fastest_settings_lose_when_they_miss_the_limit():
    fast = candidate(4, (9.0, 9.1, 8.9), ttft_s=1.2, a=1)
    decision = decide(GOAL, BASELINE, [fast, candidate(5, (2.0, 2.1, 1.9), b=1)], {})
    assert decision.recommended == 5


def test_when_nothing_meets_the_goal_the_closest_point_is_named_with_what_it_misses():
    baseline = candidate(0, (1.0, 1.1, 0.9), ttft_s=3.0)
    decision = decide(GOAL, baseline, [candidate(4, (2.0, 2.1, 1.9), ttft_s=1.5, a=1)], {})
    assert decision.outcome is Outcome.INFEASIBLE
    assert decision.recommended == 4
    assert any("p95 ttft" in reason and "1.5" in reason for reason in decision.reasons)


def test_a_limit_whose_metric_was_not_measured_is_not_met():
    blind = Candidate(
        4,
        stack(a=1),
        Measurement(status=Status.OK, metrics={"goodput_requests_per_s": (5.0, 5.0, 5.0)}),
    )
    assert decide(GOAL, None, [blind], {}).outcome is Outcome.INFEASIBLE


def test_a_crashed_trial_never_wins():
    crashed = Measurement(
        status=Status.FAILED,
        failure=Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="died"),
        metrics={"goodput_requests_per_s": (99.0, 99.0), "ttft_p95_s": (0.0, 0.0)},
    )
    decision = decide(GOAL, BASELINE, [Candidate(4, stack(a=1), crashed)], {4: "died"})
    assert decision.recommended == 0
    assert decision.rejected == {4: "died"}


def test_nothing_measured_recommends_nothing():
    decision = decide(GOAL, None, [], {0: "does-not-fit: too small"})
    assert decision.outcome is Outcome.NOTHING_MEASURED
    assert decision.recommended is None


def test_nothing_measured_names_why_the_defaults_failed_and_what_to_do():
    failure = Failure(failure=FailureClass.DOES_NOT_FIT, message="too small", fix="give it more")
    stock = Candidate(0, PolicyStack(), Measurement(status=Status.FAILED, failure=failure))
    decision = decide(GOAL, stock, [], {})
    assert decision.outcome is Outcome.NOTHING_MEASURED
    assert decision.reasons[1:] == (
        "the stock defaults: does-not-fit: too small",
        "fix: give it more",
    )


def test_one_repeat_is_never_enough_for_a_winner():
    decision = decide(GOAL, candidate(0, (1.0,)), [candidate(1, (50.0,), a=1)], {})
    assert decision.outcome is not Outcome.WINNER


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
)
def test_a_winner_is_always_separated_from_the_baseline(ours, theirs):
    decision = decide(GOAL, candidate(0, theirs), [candidate(1, ours, a=1)], {})
    if decision.outcome is Outcome.WINNER:
        assert decision.recommended == 1
        assert sum(ours) > sum(theirs)
    assert decision.recommended in (0, 1)


def test_a_noisy_rival_does_not_hide_a_proven_winner():
    proven = candidate(3, (10.0, 10.1, 9.9), a=1, b=2)
    noisy = candidate(4, (4.0, 9.5, 13.0), a=1)
    decision = decide(GOAL, candidate(0, (5.0, 5.1, 4.9)), [proven, noisy], {})
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended == 3


def test_a_winner_is_above_the_defaults_by_the_interval_that_is_shown():
    decision = decide(GOAL, BASELINE, [candidate(3, (1.5, 1.2, 1.0), a=1)], {})
    assert decision.outcome is not Outcome.WINNER
    gain = decide(GOAL, BASELINE, [candidate(3, (2.0, 2.2, 1.9), a=1)], {}).gain_ratio
    assert gain.low > 1


def test_defaults_that_serve_nothing_in_time_are_beaten_without_a_ratio():
    baseline = candidate(0, (0.0, 0.0, 0.0), ttft_s=9.0)
    decision = decide(GOAL, baseline, [candidate(3, (2.0, 2.1, 1.9), a=1)], {})
    assert decision.outcome is Outcome.WINNER
    assert decision.gain_ratio is None, "nothing is a multiple of zero"


def failed(failure):
    return Measurement(status=Status.FAILED, failure=Failure(failure=failure, message="no room"))


def test_defaults_that_cannot_start_are_beaten_by_whatever_meets_the_goal():
    baseline = Candidate(0, stack(), failed(FailureClass.DOES_NOT_FIT))
    decision = decide(GOAL, baseline, [candidate(3, (2.0, 2.1, 1.9), a=1)], {})
    assert decision.outcome is Outcome.WINNER
    assert "cannot start" in decision.reasons[0]


def test_defaults_that_crashed_are_no_proof_for_anything():
    baseline = Candidate(0, stack(), failed(FailureClass.CRASH_UNDER_LOAD))
    decision = decide(GOAL, baseline, [candidate(3, (2.0, 2.1, 1.9), a=1)], {})
    assert decision.outcome is Outcome.NO_CLEAR_WINNER
    assert decision.recommended == 3


def test_measured_once_the_best_so_far_is_named_as_no_more_than_that():
    decision = decide(GOAL, candidate(0, (1.0,)), [candidate(3, (5.0,), a=1)], {})
    assert decision.outcome is Outcome.NO_CLEAR_WINNER
    assert decision.recommended == 3
    assert "best so far" in decision.reasons[0]


def counted(good, of, rates, ttft_s=0.5):
    """So many requests of `of` in time in each round, at these rates of all requests a second."""
    return Measurement(
        status=Status.OK,
        metrics={
            "goodput_requests_per_s": tuple(r * n / of for n, r in zip(good, rates, strict=True)),
            "good_share_ratio": tuple(n / of for n in good),
            "output_tokens_per_s": tuple(30 * rate for rate in rates),
            "ttft_p95_s": (ttft_s,) * len(good),
        },
        requests_per_repeat=of,
    )


def test_rounds_know_how_many_requests_were_good_where_those_are_the_objective():
    found = counted((2, 30), 40, (2.0, 2.4))
    assert rounds_of(GOAL, found) == (Value(0.1, 2, 40), Value(1.8, 30, 40))
    assert rounds_of(Goal(objective="throughput"), found) == (Value(60.0), Value(72.0))
    unknown = found.model_copy(update={"requests_per_repeat": 0})
    assert rounds_of(GOAL, unknown) == (Value(0.1), Value(1.8)), "as in an older history"


def test_defaults_that_serve_next_to_nothing_in_time_are_beaten_in_three_rounds():
    stock = Candidate(0, PolicyStack(), counted((2, 5, 3), 40, (2.2, 2.2, 2.2), ttft_s=9.0))
    ours = Candidate(3, stack(a=1), counted((39, 40, 40), 40, (4.7, 5.0, 4.8)))
    also = Candidate(4, stack(a=1, b=2), counted((40, 39, 40), 40, (4.6, 4.7, 4.9)))
    decision = decide(GOAL, stock, [ours, also], {}, rounds=8)
    assert decision.outcome is Outcome.WINNER
    gain = decision.gain_ratio
    assert gain.estimate == pytest.approx((4.7 * 39 / 40 + 5.0 + 4.8) / (2.2 * 10 / 40))
    assert 1 < gain.low < gain.estimate
    assert gain.high is None, "so few good requests may as well have been none"
    assert "Fieller" in gain.method


def test_with_nothing_else_measured_the_defaults_need_no_rounds_to_be_kept():
    decision = decide(GOAL, candidate(0, (1.0,)), [], {})
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert "nothing else" in decision.reasons[0]


def test_with_nothing_else_confirmed_the_defaults_are_kept_and_it_says_so():
    decision = decide(GOAL, BASELINE, [], {})
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert "nothing else" in decision.reasons[0]


def test_what_limits_the_closest_point_is_the_limit_that_it_misses_by_most():
    goal = Goal(
        slos=(
            Slo(metric="ttft", statistic="p95", limit_s=1.0),
            Slo(metric="itl", statistic="p95", limit_s=0.1),
        )
    )
    point = candidate(4, (2.0, 2.1, 1.9), ttft_s=1.5, a=1)
    slow = point.measurement.model_copy(
        update={"metrics": {**point.measurement.metrics, "itl_p95_s": (0.3, 0.3, 0.3)}}
    )
    point = Candidate(4, point.stack, slow)
    said = {4: "kv-capacity, no block was free"}
    reasons = decide(goal, None, [point], {}, bound_by=said.__getitem__).reasons
    assert reasons[-1] == (
        "what limits it is p95 itl <= 100ms, which it exceeds by 200%; "
        "its run: kv-capacity, no block was free"
    )
    assert "p95 itl <= 100ms is missed: measured 300 ms" in reasons
    assert "its run" not in decide(goal, None, [point], {}).reasons[-1]


@pytest.mark.parametrize(
    ("ttft_s", "said"),
    [(1.5, "which it exceeds by 50%"), (12.6, ": it takes 12.6 times as long")],
)
def test_how_far_the_closest_point_is_off_is_said_in_words_that_suit(ttft_s, said):
    point = candidate(4, (2.0, 2.1, 1.9), ttft_s=ttft_s, a=1)
    assert decide(GOAL, None, [point], {}).reasons[-1].endswith(said)


def test_a_limit_that_was_not_measured_is_what_limits():
    blind = Measurement(status=Status.OK, metrics={"goodput_requests_per_s": (5.0, 5.0)})
    decision = decide(GOAL, None, [Candidate(4, stack(a=1), blind)], {})
    assert decision.reasons[-1] == "what limits it is p95 ttft <= 1s"


def test_without_a_winner_it_says_which_gain_is_excluded():
    calm = decide(GOAL, candidate(0, (1.0, 1.001, 0.999)), [candidate(3, (1.0, 1.002, 1), a=1)], {})
    assert calm.outcome is Outcome.NO_CLEAR_WINNER
    assert "a gain above 2% is excluded" in calm.reasons
    noisy = decide(GOAL, BASELINE, [candidate(3, (1.0, 1.3, 0.9), a=1)], {})
    # ratios 1, 1.182, 1: mean logarithm 0.0557, standard error 0.0557, t(2) = 4.303
    assert "a gain of up to 34% is not excluded" in noisy.reasons


def test_the_more_finalists_the_clearer_a_winner_has_to_be():
    """The first one alone is proved (t = 5.5 with 2 degrees, above 4.3), beside another it is not:
    6.2 is needed of a half of the error each, with no more degrees as this pair is the noisier."""
    stock = candidate(0, (1.0, 1.0, 1.0))
    ahead = candidate(3, (1.05, 1.10, 1.08), a=1)
    still = candidate(4, (1.0, 1.0, 1.0), b=1)
    assert decide(GOAL, stock, [ahead], {}).outcome is Outcome.WINNER
    assert decide(GOAL, stock, [ahead, still], {}).outcome is Outcome.NO_CLEAR_WINNER


def test_rounds_that_were_planned_and_not_needed_leave_less_to_be_wrong_by():
    """Of three rounds that are all, 2.5% count; after two looks, what those left of it."""
    ours, theirs = (1.08, 1.02, 1.07, 1.06, 1.0), (1.0, 0.99, 1.01, 1.0, 0.98)
    decision = decide(GOAL, candidate(0, theirs), [candidate(3, ours, a=1)], {}, rounds=8)
    assert decision.gain_ratio.confidence == 1 - 2 * (0.025 - 0.025 * 3 / 16)
    assert decision.gain_ratio.repeats == 5


def test_a_finalist_whose_rounds_ended_early_is_compared_in_those_that_it_had():
    """The machine is twice as fast from the fourth round on, which tells nothing for trial 4."""
    stock = candidate(0, (1.0, 1.01, 0.99, 2.0, 2.02))
    longer = candidate(4, (1.2, 1.21, 1.22, 2.4, 2.41), a=1)
    proved_early = candidate(3, (1.5, 1.51, 1.49), b=1)
    decision = decide(GOAL, stock, [longer, proved_early], {}, rounds=8)
    assert decision.outcome is Outcome.WINNER
    assert (decision.recommended, decision.ties) == (3, ())
    assert decision.gain_ratio.repeats == 3


def test_one_measurement_each_gives_a_ratio_without_bounds():
    gain = decide(GOAL, candidate(0, (2.0,)), [candidate(3, (5.0,), a=1)], {}).gain_ratio
    assert (gain.estimate, gain.low, gain.high, gain.repeats) == (2.5, None, None, 1)
