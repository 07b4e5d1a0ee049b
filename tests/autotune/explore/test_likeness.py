import math
from itertools import product

import numpy as np
import pytest

from kvtune.autotune.explore import likeness
from kvtune.autotune.explore.likeness import LENGTHS, ROUGH, SMOOTH, field_over

PLACES = np.array(list(product((0.0, 0.25, 1.0), (0.0, 7.0, 3.0))))
FIELD = field_over(PLACES, [True, False])
EVERY = np.arange(len(PLACES))


def covariance(apart, length, smooth):
    """Matern's of order 1/2 and 5/2, as Rasmussen and Williams (2006) write them, 4.17."""
    if smooth == ROUGH:
        return math.exp(-apart / length)
    far = math.sqrt(5) * apart / length
    return (1 + far + 5 * apart**2 / (3 * length**2)) * math.exp(-far)


@pytest.mark.parametrize("smooth", [ROUGH, SMOOTH])
def test_points_are_alike_by_each_knob_and_by_all_of_them(smooth):
    cells = np.array([[0, 3], [2, 1]])
    mean, both = FIELD.alike(cells, np.array([smooth, smooth]), EVERY, EVERY[:4])
    for cell, one, other in product(range(2), EVERY, EVERY[:4]):
        first = abs(PLACES[one, 0] - PLACES[other, 0])
        second = 0.0 if PLACES[one, 1] == PLACES[other, 1] else 1.0
        parts = [
            covariance(apart, LENGTHS[cells[cell, knob]], smooth)
            for knob, apart in enumerate((first, second))
        ]
        assert mean[cell, one, other] == pytest.approx(sum(parts) / 2)
        assert both[cell, one, other] == pytest.approx(parts[0] * parts[1])


def test_over_a_long_length_a_knob_changes_hardly_anything():
    last = len(LENGTHS) - 1
    mean, both = FIELD.alike(np.array([[last, last]]), np.array([SMOOTH]), EVERY, EVERY)
    assert min(mean.min(), both.min()) > 0.99


@pytest.mark.parametrize("grid", [50_000, 0], ids=["over the grid", "over the points"])
def test_functions_vary_together_as_points_are_alike(grid, monkeypatch):
    monkeypatch.setattr(likeness, "GRID", grid)
    lengths, count = np.array([1, 3]), 4000
    drawn = FIELD.functions(lengths, SMOOTH, count, np.random.default_rng(1))
    told = FIELD.alike(lengths[None], np.array([SMOOTH]), EVERY, EVERY)
    for functions, alike in zip(drawn, told, strict=True):
        assert functions.shape == (count, len(PLACES))
        found = functions.T @ functions / count
        # Five standard errors of a covariance of two standard normal draws.
        assert np.all(np.abs(found - alike[0]) < 5 * np.sqrt((1 + alike[0] ** 2) / count))


def test_what_knobs_do_alone_is_told_from_what_they_do_together():
    first = np.select([PLACES[:, 0] == 0.25, PLACES[:, 0] == 1.0], [2.0, -1.0])
    second = np.where(PLACES[:, 1] == 7.0, 0.5, 0.0)
    assert FIELD.alone(first + second) == pytest.approx(first + second)
    # Two by two: +1 and -1 in turn have no effect of one knob.
    square = field_over(np.array(list(product((0.0, 1.0), repeat=2))), [True, True])
    together = np.array([1.0, -1.0, -1.0, 1.0])
    assert square.alone(together + 3.0) == pytest.approx(np.full(4, 3.0))
