"""Numbers in words: what is known of a bound is told, and nothing else."""

from typing import get_args

import pytest

from kvtune.autotune.words import START_KINDS, interval, percent_change
from kvtune.types import EffectiveConfig, Interval


@pytest.mark.parametrize(
    ("low", "high", "as_ratio", "as_change"),
    [
        (1.25, 1.75, "1.5 (1.25 to 1.75)", "+50% (+25% to +75%)"),
        (1.25, None, "1.5 (at least 1.25)", "+50% (at least +25%)"),
        (None, None, "1.5", "+50%"),
    ],
)
def test_a_ratio_is_told_with_the_bounds_that_it_has(low, high, as_ratio, as_change):
    ratio = Interval(estimate=1.5, low=low, high=high, unit="ratio")
    assert interval(ratio) == as_ratio
    assert percent_change(ratio) == as_change


def test_every_way_in_which_a_server_came_to_run_has_words():
    known = EffectiveConfig.model_fields["start_kind"].annotation
    assert {kind for one in get_args(known) for kind in get_args(one)} == set(START_KINDS)
