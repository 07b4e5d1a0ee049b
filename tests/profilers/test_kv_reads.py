import pytest

from kvtune.profilers.kv_reads import PAGES_READ, PAGES_SEEN, read_share


@pytest.mark.parametrize(
    ("counters", "share"),
    [
        ({}, 1.0),
        ({PAGES_SEEN: 0.0, PAGES_READ: 0.0}, 1.0),
        ({PAGES_SEEN: 400.0, PAGES_READ: 100.0}, 0.25),
        ({PAGES_SEEN: 400.0, PAGES_READ: 400.0}, 1.0),
        # Scraped between the two: read is counted a moment later.
        ({PAGES_SEEN: 400.0, PAGES_READ: 410.0}, 1.0),
        ({PAGES_SEEN: 400.0}, 1.0),
    ],
)
def test_the_share_is_of_the_pages_that_were_counted(counters, share):
    assert read_share(counters) == share
