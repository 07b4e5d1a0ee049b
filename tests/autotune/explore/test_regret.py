import numpy as np
import pytest

from kvtune.autotune.explore.acquire import Outlook
from kvtune.autotune.explore.regret import excess, expected_loss, regret_of
from kvtune.autotune.explore.responses import RATE
from kvtune.autotune.explore.surrogate import DRAWS, Beliefs

EVERYONE = np.ones(2)
BOTH = "all 2 configurations"


def outlook(*columns, **limits):
    """Draws of the log rate of each point, one column each, and of limits."""

    def beliefs(draws):
        draws = np.array(draws, dtype=float).T
        return Beliefs(draws.mean(axis=0), draws.var(axis=0), draws, lambda rows: draws[rows], 0.0)

    return Outlook({RATE: beliefs(columns), **{name: beliefs(one) for name, one in limits.items()}})


def always(value):
    return np.full(DRAWS, value)


def half(value, other):
    return np.where(np.arange(DRAWS) % 2, value, other)


def test_who_is_best_in_every_draw_is_best_for_sure():
    found = regret_of(outlook(always(1.0), always(0.5)), 0, EVERYONE, BOTH)
    assert found.within == {"1%": 1.0, "2%": 1.0, "5%": 1.0}
    assert (found.bound_ratio, found.points) == (0.0, 2)


def test_a_point_that_may_be_better_is_told_with_its_probability_and_size():
    found = regret_of(outlook(always(0.0), half(np.log(1.03), np.log(0.9))), 0, EVERYONE, BOTH)
    assert found.within == {"1%": 0.5, "2%": 0.5, "5%": 1.0}
    assert found.bound_ratio == pytest.approx(0.03)
    assert "with 50% probability it is within 2% of the best of all 2 configurations" in found.says
    assert found.says.endswith("and with 95% none is better by more than 3%")


def test_who_cannot_run_or_keep_the_limits_is_no_rival():
    better = always(0.0), always(1.0)
    assert regret_of(outlook(*better), 0, np.array([1.0, 0.0]), BOTH).bound_ratio == 0.0
    missed = outlook(*better, itl=[always(-1.0), always(1.0)])
    assert regret_of(missed, 0, EVERYONE, BOTH).bound_ratio == 0.0


def test_a_chosen_point_that_may_miss_a_limit_is_not_sure():
    found = regret_of(
        outlook(always(0.0), always(-0.2), itl=[half(-1.0, 1.0), always(-1.0)]), 0, EVERYONE, BOTH
    )
    assert found.within["5%"] == 0.5
    assert found.bound_ratio == 10.0
    assert found.says.endswith("with 50% it misses a limit itself")


def test_where_nothing_keeps_the_limits_nothing_is_better():
    none = outlook(always(0.0), always(0.5), itl=[always(1.0), always(1.0)])
    assert excess(none, 0, EVERYONE) == pytest.approx(np.zeros(DRAWS))


def test_what_a_choice_lacks_is_the_mean_share_of_the_best_and_all_where_it_misses_a_limit():
    # A quarter more than the choice is a fifth of the best; the last draw misses a limit.
    behind = np.array([0.0, 0.25, 0.0, np.inf])
    assert expected_loss(behind) == pytest.approx((0.2 + 1.0) / 4)


def test_a_choice_of_which_nothing_is_known_is_told_so_without_figures_that_say_nothing():
    beliefs = outlook(always(0.0), always(np.log(50.0)))
    found = regret_of(beliefs, 0, EVERYONE, BOTH)
    assert found.says == f"the trials do not tell how far it is from the best of {BOTH}"
    assert (found.bound_ratio, found.within["5%"]) == (10.0, 0.0)
