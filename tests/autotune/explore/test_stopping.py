import pytest

from kvtune.autotune.explore.stopping import why_stop


@pytest.mark.parametrize(
    ("trials", "within", "says"),
    [
        (10, 0.95, "the best of 10 trials is within 1% of the best of the 40 looked at, of 99"),
        (25, 0.99, "with a probability of 99%"),
        (9, 1.0, ""),
        (30, 0.94, ""),
    ],
)
def test_a_search_ends_when_it_is_sure_that_nothing_is_better(trials, within, says):
    found = why_stop(trials=trials, within=within, among="the 40 looked at, of 99")
    assert says in found
    assert bool(found) == bool(says)
