import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.paired import (
    above_probability,
    bounded_items_needed,
    change_interval,
    holm,
    items_needed,
    items_needed_like,
    mean_bounds,
    mean_items_needed,
    tango_interval,
    widened,
    worse_probability,
)
from kvtune.profilers.statistics import Estimate, mean_interval

Z = NormalDist().inv_cdf(0.95)

counts = st.integers(1, 60).flatmap(
    lambda items: st.tuples(st.integers(0, items), st.just(items)).flatmap(
        lambda drawn: st.tuples(st.just(drawn[0]), st.integers(0, items - drawn[0]), st.just(items))
    )
)


def gains_of(broken, mended, items):
    return [-1.0] * broken + [1.0] * mended + [0.0] * (items - broken - mended)


def score_z(broken, mended, items, change):
    """Tango's statistic from its definition: the nuisance share maximises the likelihood."""
    best, share = -math.inf, 0.0
    low, high = max(0.0, -change), min(1.0, (1 - change) / 2)
    for step in range(20001):
        p_broken = low + (high - low) * step / 20000
        cells = (p_broken, p_broken + change, 1 - 2 * p_broken - change)
        seen = (broken, mended, items - broken - mended)
        if any(p <= 0 < count for p, count in zip(cells, seen, strict=True)):
            continue
        likelihood = sum(count * math.log(p) for p, count in zip(cells, seen, strict=True) if count)
        if likelihood > best:
            best, share = likelihood, p_broken
    return (mended - broken - items * change) / math.sqrt(
        items * (2 * share + change - change * change)
    )


@pytest.mark.parametrize(
    ("broken", "mended", "items"), [(12, 2, 50), (3, 0, 40), (1, 5, 30), (0, 2, 24), (7, 7, 20)]
)
def test_tangos_bounds_are_where_the_score_test_turns(broken, mended, items):
    _, low, high = tango_interval(broken, mended, items)
    assert score_z(broken, mended, items, low) == pytest.approx(Z, abs=2e-3)
    assert score_z(broken, mended, items, high) == pytest.approx(-Z, abs=2e-3)


@pytest.mark.parametrize("items", [1, 12, 24, 52, 400])
def test_no_changed_item_still_leaves_a_loss_possible(items):
    estimate, low, high = tango_interval(0, 0, items)
    assert estimate == 0
    assert low == pytest.approx(-Z * Z / (items + Z * Z))
    assert high == pytest.approx(Z * Z / (items + Z * Z))


@given(counts)
def test_tango_turns_over_and_holds_the_estimate(drawn):
    broken, mended, items = drawn
    there = tango_interval(broken, mended, items)
    back = tango_interval(mended, broken, items)
    assert there.low == pytest.approx(-back.high)
    assert -1 <= there.low <= there.estimate <= there.high <= 1
    assert there.high - there.low > 0


@pytest.mark.parametrize(("broken", "mended", "items"), [(1, 0, 0), (3, 2, 4), (-1, 0, 4)])
def test_impossible_counts_are_refused(broken, mended, items):
    with pytest.raises(ValueError, match="do not exist"):
        tango_interval(broken, mended, items)


def outcomes(items, p_broken, p_mended):
    """Every (broken, mended) and its probability, from the trinomial's definition."""
    for broken in range(items + 1):
        for mended in range(items + 1 - broken):
            same = items - broken - mended
            chance = (
                math.comb(items, broken)
                * math.comb(items - broken, mended)
                * p_broken**broken
                * p_mended**mended
                * (1 - p_broken - p_mended) ** same
            )
            if chance > 1e-9:
                yield broken, mended, chance


@pytest.mark.parametrize("mended_share", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("items", [30, 52, 70])
def test_a_loss_of_exactly_the_limit_seldom_passes_or_fails(items, mended_share):
    passed = failed = 0.0
    for broken, mended, chance in outcomes(items, 0.1 + mended_share, mended_share):
        passed += chance * (tango_interval(broken, mended, items).low >= -0.1)
        if broken - mended > 0.1 * items:
            gains = gains_of(broken, mended, items)
            failed += chance * (worse_probability(gains, 0.1, bounded=True) <= 0.05)
    assert passed <= 0.07
    assert 0.005 < failed <= 0.06


@pytest.mark.parametrize("changed", [0.02, 0.2])
def test_noise_alone_almost_never_fails(changed):
    failed = sum(
        chance
        for broken, mended, chance in outcomes(40, changed / 2, changed / 2)
        if broken > mended
        and worse_probability(gains_of(broken, mended, 40), 0.05, bounded=True) <= 0.05
    )
    assert failed <= 0.015


def test_probability_of_broken_items_is_the_trinomials():
    # Without mended items among few, the likeliest share of mended ones under the limit is known:
    # all items changed, so shares 0.525 and 0.475 at a limit of 0.05.
    assert worse_probability([-1.0] * 4, 0.05, bounded=True) == pytest.approx(0.525**4)
    gains = gains_of(6, 0, 12)
    # Shares found by hand from Tango's equation: (6 - 18 * 0.05) / 24 = 0.2125 mended.
    expected = sum(
        chance for broken, mended, chance in outcomes(12, 0.2625, 0.2125) if broken - mended >= 6
    )
    assert worse_probability(gains, 0.05, bounded=True) == pytest.approx(expected, rel=1e-6)


def rare_total_losses(rng):
    return -1.0 if rng.random() < 0.1 else rng.choice([-0.001, 0.001])


def many_small_changes(rng):
    return rng.choice([-0.5, -0.25, 0.0, 0.25, 0.4]) - 0.08


@pytest.mark.parametrize("draw", [rare_total_losses, many_small_changes])
@pytest.mark.parametrize("items", [12, 60])
def test_graded_scores_keep_the_error_rates(draw, items):
    rng = random.Random(7)
    runs = [[draw(rng) for _ in range(items)] for _ in range(600)]
    passed = sum(change_interval(gains, bounded=True).low >= -0.1 for gains in runs)
    failed = sum(worse_probability(gains, 0.1, bounded=True) <= 0.05 for gains in runs)
    assert passed <= 600 * 0.07
    assert failed <= 600 * 0.07


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_bounded_interval_has_a_width_and_holds_the_mean(gains):
    mean, low, high = change_interval(gains, bounded=True)
    assert -1 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high - low > 1 / (len(gains) + 1)


def test_unchanged_graded_scores_prove_no_more_than_unchanged_right_or_wrong_ones():
    for items in (5, 24, 60):
        graded = change_interval([1e-9] * items, bounded=True)
        assert graded.low <= tango_interval(0, 0, items).low


def test_right_or_wrong_gains_get_tangos_interval():
    assert change_interval(gains_of(3, 1, 20), bounded=True) == tango_interval(3, 1, 20)


def test_unbounded_mean_has_students_interval_or_a_wider_one():
    values = [0.1, 0.3, -0.2, 0.4, 0.0]
    mean, low, high = mean_bounds(values)
    half = 2.132 * math.sqrt(0.057 / 5)  # printed t(0.95, 4); variance by hand
    assert mean == pytest.approx(0.12)
    assert low == pytest.approx(0.12 - half, abs=1e-3)
    assert high == pytest.approx(0.12 + half, abs=1e-3)
    assert change_interval(values, bounded=False) == mean_bounds(values)


def test_long_tail_widens_the_upper_bound_beyond_students():
    values = [0.0] * 95 + [1.0] * 5
    half = 1.6604 * math.sqrt((5 - 100 * 0.0025) / 99 / 100)
    assert mean_bounds(values).high > 0.05 + half


@pytest.mark.parametrize("items", [3, 4, 20])
def test_equal_unbounded_values_leave_open_what_one_unlike_them_could_do(items):
    mean, low, high = mean_bounds([0.3] * items, spread=2.0)
    beside_one_more = mean_interval([*[0.3] * items, 2.3], 0.9)
    assert mean == pytest.approx(0.3)
    assert high == pytest.approx(beside_one_more.high)
    assert mean - low == pytest.approx(high - mean)


def test_values_that_vary_more_than_a_spread_keep_their_own_interval():
    values = [0.1, 0.3, -0.2, 0.4, 0.0]
    assert mean_bounds(values, spread=0.01) == mean_bounds(values)


@pytest.mark.parametrize(("items", "sure"), [(3, False), (60, True)])
def test_a_few_equal_unbounded_values_are_no_sure_loss(items, sure):
    lost = worse_probability([-0.3] * items, 0.2, bounded=False, spread=1.0)
    above = above_probability([0.3] * items, 0.2, spread=1.0)
    assert (lost <= 0.05, above <= 0.05) == (sure, sure)


@pytest.mark.parametrize("items", [6, 13, 30, 60])
def test_rare_large_losses_seldom_pass_without_bounds(items):
    # A fifth of the items lose a whole spread, so the mean loses exactly the limit.
    passed = sum(
        math.comb(items, lost) * 0.2**lost * 0.8 ** (items - lost)
        for lost in range(items)
        if mean_bounds([-1.0] * lost + [0.0] * (items - lost), spread=1.0).low >= -0.2
    )
    assert passed <= 0.07


def test_two_values_have_no_bounds():
    assert mean_bounds([0.1, 0.2], spread=1.0)[1:] == (None, None)
    assert worse_probability([-9.0, -9.0], 0.1, bounded=False) == 1.0


def test_probability_of_a_level_is_students():
    # t = (0.4 - 0.1) / (0.2 / sqrt(4)) = 3 with 3 degrees of freedom: one-sided 0.0288 (tables)
    values = [0.2, 0.4, 0.4, 0.6]
    spread = math.sqrt(sum((value - 0.4) ** 2 for value in values) / 3)
    limit = 0.4 - 3 * spread / 2
    assert above_probability(values, limit) == pytest.approx(0.0288, abs=1e-4)
    assert above_probability([0.3] * 3, 0.2) == 0.0
    assert above_probability([0.2] * 3, 0.2) == 1.0


def test_holm_is_the_textbooks():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_the_value_and_bonferroni(probabilities):
    for before, after in zip(probabilities, holm(probabilities), strict=True):
        assert before <= after <= min(1.0, len(probabilities) * before)


def test_items_that_support_a_limit_without_any_change():
    assert items_needed(0.05) == math.ceil(Z * Z * 0.95 / 0.05) == 52
    assert items_needed(0.01) == 268
    assert items_needed(0.0) is None


@pytest.mark.parametrize(("limit", "discordance"), [(0.05, 0.0), (0.05, 0.1), (0.2, 0.5)])
def test_needed_items_are_the_fewest_that_do(limit, discordance):
    needed = items_needed(limit, discordance)
    for items, enough in ((needed, True), (needed - 1, False)):
        half = items * discordance / 2
        assert (tango_interval(half, half, items).low >= -limit) is enough


@pytest.mark.parametrize("discordance", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("power", [0.8, 0.99])
def test_so_many_items_support_a_limit_as_often_as_is_asked(discordance, power):
    items = items_needed(0.1, discordance, power=power)
    passed = sum(
        chance
        for broken, mended, chance in outcomes(items, discordance / 2, discordance / 2)
        if tango_interval(broken, mended, items).low >= -0.1
    )
    assert passed >= power - 0.01
    assert items > items_needed(0.1, discordance)


@pytest.mark.parametrize("power", [0.8, 0.99])
def test_graded_and_unbounded_scores_support_a_limit_as_often_as_is_asked(power):
    rng = random.Random(4)

    def passed(items, scale, **how):
        runs = ([rng.gauss(0, 0.2) * scale for _ in range(items)] for _ in range(300))
        return sum(change_interval(r, **how).low >= -0.1 * scale for r in runs) / 300

    graded = bounded_items_needed(0.04, 0.1, power=power)
    assert passed(graded, 1, bounded=True) >= power - 0.06
    unbounded = mean_items_needed(0.36, 0.3, spread=3.0, power=power)
    assert passed(unbounded, 3, bounded=False, spread=3.0) >= power - 0.06


@pytest.mark.parametrize("power", [0.8, 0.95, 0.995])
def test_rare_whole_changes_without_bounds_support_a_limit_as_often_as_is_asked(power):
    items = mean_items_needed(0.01, 0.2, spread=1.0, power=power)
    passed = sum(
        chance
        for broken, mended, chance in outcomes(items, 0.005, 0.005)
        if mean_bounds(gains_of(broken, mended, items), spread=1.0).low >= -0.2
    )
    assert passed >= power - 0.01


def test_equal_unbounded_values_are_asked_until_one_unlike_them_would_not_matter():
    needed = items_needed_like([0.0] * 3, 0.2, bounded=False, spread=1.0)
    assert mean_bounds([0.0] * needed, spread=1.0).high <= 0.2
    assert mean_bounds([0.0] * (needed - 1), spread=1.0).high > 0.2


def test_items_needed_by_graded_scores_do_support_the_limit():
    pattern = [0.5, -0.5, 0.0, 0.0]
    needed = items_needed_like(pattern, 0.05, bounded=True)
    assert change_interval(pattern * (needed // 4 + 1), bounded=True).low >= -0.05
    assert change_interval(pattern * (needed // 4 - 1), bounded=True).low < -0.05


def test_items_needed_by_unbounded_values_grow_with_the_square():
    few = items_needed_like([0.2, -0.2], 0.05, bounded=False)
    assert few == math.ceil((Z * 0.2 / 0.05) ** 2)
    assert items_needed_like([0.4, -0.4], 0.05, bounded=False) == pytest.approx(4 * few, abs=3)


def test_an_interval_is_widened_to_what_texts_give_around_its_own_mean():
    found = widened(Estimate(-0.1, -0.2, 0.0), Estimate(-0.2, -0.5, 0.3))
    assert found.estimate == -0.1
    assert found.low == pytest.approx(-0.4)
    assert found.high == pytest.approx(0.4)
    narrow = Estimate(-0.3, -0.31, -0.29)
    assert widened(Estimate(-0.1, -0.2, 0.0), narrow) == Estimate(-0.1, -0.2, 0.0)
    assert widened(narrow, Estimate(0.0, None, None)) == Estimate(-0.3, None, None)
