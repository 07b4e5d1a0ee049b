import pytest

from kvtune.autotune.explore.stopping import why_stop

AMONG = "the 40 looked at, of 99"


@pytest.mark.parametrize(
    ("trials", "lost", "enough", "says"),
    [
        (8, 0.02, 0.02, "the best of 8 trials is expected to be 2.0% short of the best of the 40"),
        (25, 0.004, 0.005, "of which 0.5% is enough"),
        (7, 0.0, 0.02, ""),
        (30, 0.021, 0.02, ""),
        (30, 0.0, 0.0, ""),
    ],
)
def test_a_search_ends_when_little_is_expected_to_be_missing(trials, lost, enough, says):
    found = why_stop(trials=trials, lost=lost, enough=enough, among=AMONG)
    assert says in found
    assert bool(found) == bool(says)
