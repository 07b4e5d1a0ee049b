import math

import pytest

from kvtune.autotune.explore.responses import (
    RATE,
    SHARE,
    noise_of_responses,
    responses_of,
    score,
)
from kvtune.types import Goal, Slo

LIMITED = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=2.0),))
FIGURES = {
    "requests_per_s": 4.0,
    "goodput_requests_per_s": 1.0,
    "good_share_ratio": 0.25,
    "output_tokens_per_s": 100.0,
    "ttft_p95_s": 3.0,
}


def test_goodput_with_limits_is_a_rate_and_the_odds_to_be_good():
    found = responses_of(FIGURES, LIMITED, 64)
    assert found[RATE] == pytest.approx(math.log(4))
    assert found[SHARE] == pytest.approx(math.log(1 / 3))
    assert found["ttft_p95_s"] == pytest.approx(math.log(1.5))
    assert math.exp(found[RATE]) / (1 + math.exp(-found[SHARE])) == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_is_known_to_half_a_request(share):
    found = responses_of({**FIGURES, "good_share_ratio": share}, LIMITED, 10)
    assert abs(found[SHARE]) == pytest.approx(math.log(0.95 / 0.05))


def test_without_limits_or_parts_the_objective_itself_is_learnt():
    assert responses_of(FIGURES, Goal(), 64) == {RATE: math.log(1.0)}
    whole = Goal(objective="throughput")
    assert responses_of(FIGURES, whole, 64) == {RATE: pytest.approx(math.log(100))}
    bare = {"goodput_requests_per_s": 0.0, "ttft_p95_s": 2.0}
    assert responses_of(bare, LIMITED, 64) == {RATE: math.log(0.01), "ttft_p95_s": 0.0}


def test_what_was_not_measured_is_left_out():
    assert responses_of({}, LIMITED, 64) == {}


def test_a_missed_limit_outweighs_a_small_gain():
    kept = score({RATE: 1.0, "ttft_p95_s": -0.5})
    assert score({RATE: 1.2, "ttft_p95_s": -0.1}) > kept
    assert score({RATE: 1.2, "ttft_p95_s": 0.1}) < kept
    assert score({RATE: 1.0, SHARE: 0.0}) == pytest.approx(1 - math.log(2))


def test_noise_goes_from_metrics_to_the_responses_that_they_are_behind():
    goal = Goal(
        slos=(
            Slo(metric="ttft", statistic="p95", limit_s=1),
            Slo(metric="itl", statistic="p50", limit_s=1),
            Slo(metric="e2e", statistic="max", limit_s=1),
        )
    )
    noise = {"output_tokens_per_s": 0.04, "ttft_p50_s": 0.2, "itl_p50_s": 0.05}
    assert noise_of_responses(noise, goal) == {
        RATE: 0.04,
        "ttft_p95_s": 0.2,
        "itl_p50_s": 0.05,
        "e2e_max_s": 0.04,
    }
    assert noise_of_responses({}, goal) == {}
