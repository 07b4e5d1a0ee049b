import pytest

from kvtune.autotune.explore.stopping import why_stop

USUAL = {"trials": 10, "trials_left": 5, "within": 0.5, "worth": 0.1, "best": 4.0}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"within": 0.93}, "the best of 10 trials is within 2% of the best of the space"),
        ({"within": 0.93, "trials": 7}, ""),
        # 5 trials of 0.003 are 0.4% of 4.
        ({"worth": 0.003}, "the 5 trials that are left would add 0.4% at most"),
        ({"worth": 0.005}, ""),
        ({"worth": 0.0, "best": 0.0}, ""),
    ],
)
def test_a_search_ends_when_nothing_is_left_to_gain(changed, says):
    found = why_stop(**{**USUAL, **changed})
    assert found.startswith(says)
    assert bool(found) == bool(says)
