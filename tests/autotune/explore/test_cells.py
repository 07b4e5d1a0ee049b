import numpy as np
import pytest

from kvtune.autotune.explore import cells
from kvtune.autotune.explore.cells import LOUDS, SIZES, drawn_cells
from kvtune.autotune.explore.likeness import LENGTHS, LIKELY


def draws(likelihood, times=60, **changes):
    settings = {"scale": 1.0, "centre": 0.3, "count": 16} | changes
    return [
        drawn_cells(likelihood, 2, rng=np.random.default_rng(seed), **settings)
        for seed in range(times)
    ]


def shares(values, options):
    """How often each option was drawn, over all."""
    together = np.concatenate(values)
    return np.array([np.isclose(together, option).mean() for option in options])


def before(options, centre, spread):
    """A bell in natural logs, over these options alone."""
    weights = np.exp(-0.5 * (np.log(np.array(options) / centre) / spread) ** 2)
    return weights / weights.sum()


def nothing(found):
    return np.zeros(len(found.alone))


def test_without_measurements_settings_are_as_likely_as_before():
    found = draws(nothing)
    lengths = shares([one.length[:, 1] for one in found], range(len(LENGTHS)))
    assert lengths == pytest.approx(np.array(LIKELY) / sum(LIKELY), abs=0.08)
    assert shares([one.joint for one in found], SIZES) == pytest.approx(
        before(SIZES, 0.3, 1.0), abs=0.08
    )
    assert shares([one.louder for one in found], LOUDS) == pytest.approx(
        before(LOUDS, 1.0, 0.5), abs=0.08
    )


def test_settings_that_explain_more_are_drawn_by_how_much_more():
    gained = np.linspace(0, 3, len(SIZES))

    def prefers_large(found):
        return gained[np.argmin(np.abs(found.alone[:, None] - np.array(SIZES)), axis=1)]

    found = draws(prefers_large)
    after = before(SIZES, 0.3, 1.0) * np.exp(gained)
    assert shares([one.alone for one in found], SIZES) == pytest.approx(
        after / after.sum(), abs=0.09
    )
    assert shares([one.joint for one in found], SIZES) == pytest.approx(
        before(SIZES, 0.3, 1.0), abs=0.09
    )


def test_settings_that_explain_only_together_are_found():
    def wants_both(found):
        short = found.length[:, 0] == 0
        return np.where(short & (found.own == 0.1), 12.0, 0.0)

    # Before, one in 36 is so; after, all but one in some 4,500.
    both = [(one.length[:, 0] == 0) & (one.own == 0.1) for one in draws(wants_both, times=20)]
    assert np.concatenate(both).mean() > 0.9


def test_sizes_are_in_the_unit_of_the_response():
    (one,) = draws(nothing, times=1, scale=4.0)
    assert set(one.alone) <= {4 * size for size in SIZES}
    assert set(one.own) <= {4 * own for own in cells.OWNS}
    assert set(one.louder) <= set(LOUDS)


def test_equal_cells_are_counted():
    (one,) = draws(lambda found: np.where(found.places.sum(axis=1) == 0, 100.0, 0.0), times=1)
    twice = one.only(np.array([0, 3, 0]))
    kept, counts = twice.distinct()
    assert counts.sum() == 3
    assert len(kept.places) == len(np.unique(twice.places, axis=0)) == len(kept.length)
