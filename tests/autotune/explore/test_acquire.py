import numpy as np
import pytest

from kvtune.autotune.explore.acquire import Outlook, surprise, worth
from kvtune.autotune.explore.responses import RATE, SHARE
from kvtune.autotune.explore.surrogate import DRAWS, Beliefs

LIMIT = "ttft_p95_s"


def beliefs(mean, spread, noise=1e-4):
    """Independent points."""
    mean, variance = np.array(mean, dtype=float), np.array(spread, dtype=float) ** 2
    rng = np.random.default_rng(0)
    draws = mean + rng.standard_normal((DRAWS, len(mean))) * np.sqrt(variance)
    return Beliefs(mean, variance, draws, lambda rows: np.diag(variance)[rows], noise)


def rows(*numbers):
    return np.array(numbers, dtype=np.intp)


def test_a_point_that_may_be_better_is_worth_what_it_betters_on_average():
    found = worth(Outlook({RATE: beliefs([0.0, 0.0], [0.0, 0.2])}), rows(0))
    # E[max(0, exp(0.2 z) - 1)] of a standard normal z, integrated by the log-normal formula.
    assert found[1] == pytest.approx(0.0910, abs=0.015)
    assert found[0] == pytest.approx(0.0, abs=1e-6)


def test_more_is_expected_of_the_better_and_of_the_less_known():
    found = worth(Outlook({RATE: beliefs([0.0, 0.1, 0.0, -1.0], [0.0, 0.1, 0.1, 0.1])}), rows(0))
    assert found[1] > found[2] > found[3]
    assert found[3] == pytest.approx(0.0, abs=1e-6)
    wide = worth(Outlook({RATE: beliefs([0.0, 0.0, 0.0], [0.0, 0.1, 0.3])}), rows(0))
    assert wide[2] > wide[1]


def test_a_measured_point_is_worth_another_look_only_where_it_is_unsure():
    sure = worth(Outlook({RATE: beliefs([0.0, 0.01], [1e-4, 1e-4])}), rows(0, 1))
    assert sure == pytest.approx([0.0, 0.0], abs=1e-3)
    unsure = worth(Outlook({RATE: beliefs([0.0, 0.01], [0.1, 0.1])}), rows(0, 1))
    assert unsure.min() > 0.02


def test_noise_makes_a_measurement_worth_less():
    exact = worth(Outlook({RATE: beliefs([0.0, 0.0], [0.0, 0.2])}), rows(0))
    noisy = worth(Outlook({RATE: beliefs([0.0, 0.0], [0.0, 0.2], noise=0.2)}), rows(0))
    assert 0 < noisy[1] < exact[1] / 2


def test_a_point_that_misses_a_limit_is_worth_nothing():
    limit = beliefs([-0.5, 0.5, -0.5], [0.01, 0.01, 0.01])
    found = worth(Outlook({RATE: beliefs([0.0, 0.5, 0.5], [0.0, 0.1, 0.1]), LIMIT: limit}), rows(0))
    assert found[1] == pytest.approx(0.0, abs=1e-6)
    assert found[2] > 0.3


def test_while_nothing_keeps_the_limits_who_may_keep_them_comes_first():
    limit = beliefs([2.0, 1.0, 0.3], [0.1, 0.3, 0.3])
    found = worth(Outlook({RATE: beliefs([0.5, 0.5, 0.0], [0.1, 0.1, 0.1]), LIMIT: limit}), rows(0))
    assert found.argmax() == 2


def test_without_a_measured_point_anything_is_worth_what_is_expected_of_it():
    found = worth(Outlook({RATE: beliefs([0.0, 0.5], [0.01, 0.01])}), rows())
    assert found == pytest.approx(np.exp([0.0, 0.5]), rel=0.02)


def drawn(*columns):
    """A log rate whose draws are these, one column for each point, over and over."""
    draws = np.resize(np.log(np.array(columns, dtype=float).T), (DRAWS, len(columns)))
    return Beliefs(draws.mean(axis=0), draws.var(axis=0), draws, lambda rows: draws[rows], 0.0)


def test_a_point_surprises_by_what_it_is_better_where_it_is_the_best_of_all():
    # Four draws in turn; the first point is measured. The third is never the best of all.
    rate = drawn([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 6.0], [2.1, 2.1, 1.0, 2.1], [2.2, 2.2, 1, 1])
    assert surprise(Outlook({RATE: rate}), rows(0)) == pytest.approx([0.0, 1.0, 0.0, 0.1])
    limit = beliefs([-1.0, 1.0, -1.0, -1.0], [0.01] * 4)
    kept = surprise(Outlook({RATE: rate, LIMIT: limit}), rows(0))
    assert kept == pytest.approx([0.0, 0.0, 0.025, 0.1])


def test_the_objective_is_the_rate_of_the_good():
    outlook = Outlook({RATE: beliefs([1.0], [0.1]), SHARE: beliefs([0.0], [0.1])})
    assert outlook.middle() == pytest.approx([np.e / 2])
    assert outlook.expected() == pytest.approx([np.e / 2])
    assert outlook.drawn() == pytest.approx(
        np.exp(outlook.beliefs[RATE].draws) / (1 + np.exp(-outlook.beliefs[SHARE].draws))
    )


def test_limits_hold_where_all_draws_are_below_them():
    outlook = Outlook(
        {
            RATE: beliefs([0.0] * 3, [0.1] * 3),
            LIMIT: beliefs([-1.0, 0.0, -1.0], [0.1] * 3),
            "itl_p95_s": beliefs([-1.0, -1.0, 1.0], [0.1] * 3),
        }
    )
    assert outlook.limits == [LIMIT, "itl_p95_s"]
    assert outlook.drawn_to_hold().mean(axis=0) == pytest.approx([1.0, 0.5, 0.0], abs=0.15)
    assert outlook.chance_to_hold() == pytest.approx([1.0, 0.5, 0.0], abs=0.01)
