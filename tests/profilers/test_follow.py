"""What a follower keeps of a server's lives, told reading by reading."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.follow import Follower
from kvtune.profilers.scrape import PREFIX_COUNTERS


class Script:
    """A scraper whose pages are given; None is a failure."""

    def __init__(self, *pages):
        self.pages = iter(pages)
        self.problems = []

    async def fetch(self):
        page = next(self.pages)
        if page is None:
            self.problems.append("/metrics: connection refused")
        return page


def page(tokens, start=None, running=1):
    text = f"vllm:prompt_tokens_total {tokens}\nvllm:num_requests_running {running}\n"
    return text if start is None else text + f"process_start_time_seconds {start}\n"


def followed(*pages):
    """Read every page, all but the first and the last as samples of the load."""

    async def main():
        follower = Follower(Script(*pages))
        for number in range(len(pages)):
            await follower.read(is_sample=0 < number < len(pages) - 1)
        return follower.seen(0.0)

    return asyncio.run(main())


def test_readings_before_and_after_are_no_samples():
    seen = followed(page(1, running=0), page(3), page(6, running=7), page(9, running=0))
    assert seen.counters == {"vllm:prompt_tokens_total": 8.0}
    assert [value for _, value in seen.gauges["vllm:num_requests_running"]] == [1.0, 7.0]
    assert [value for _, value in seen.gauges["vllm:prompt_tokens_total"]] == [3.0, 6.0]
    assert (seen.notes, seen.lost, seen.is_whole) == ((), "", True)


def test_load_and_prefix_counters_are_sampled_under_their_new_names():
    text = """
vllm:gpu_cache_usage_perc{engine="0"} 0.5
vllm:gpu_prefix_cache_queries_total{engine="0"} 40
vllm:gpu_prefix_cache_hits_total{engine="0"} 30
vllm:request_success_total{engine="0"} 9
process_start_time_seconds 5
"""
    sampled = {series: values[0][1] for series, values in followed(text, text, text).gauges.items()}
    assert sampled == {
        "vllm:kv_cache_usage_perc": 0.5,
        PREFIX_COUNTERS[0]: 40.0,
        PREFIX_COUNTERS[1]: 30.0,
    }


@pytest.mark.parametrize("starts", [(None, None), (5, 9)])
def test_the_longest_life_counts_and_others_do_not_leak(starts):
    """Lives differ in how long they were seen, which the pages of this test take no time for."""
    seen = followed(page(50, starts[0]), page(2, starts[1]), page(4, starts[1]), page(7, starts[1]))
    assert seen.counters == {"vllm:prompt_tokens_total": 5.0}
    assert [value for _, value in seen.gauges["vllm:num_requests_running"]] == [1.0, 1.0]
    assert not seen.is_whole
    assert "restarted once meanwhile" in seen.notes[0]


def test_a_reading_that_fails_in_between_is_only_said():
    seen = followed(page(1), None, page(3))
    assert (seen.lost, seen.is_whole) == ("", True)
    assert seen.notes == ("the server's counters are incomplete: /metrics: connection refused",)
    assert seen.counters == {"vllm:prompt_tokens_total": 2.0}


def test_a_server_that_is_gone_at_the_end_is_lost():
    seen = followed(page(1), page(3), None, None)
    assert "(/metrics: connection refused)" in seen.lost
    assert seen.lost in seen.notes
    assert seen.counters == {"vllm:prompt_tokens_total": 2.0}
    assert not seen.is_whole


def test_a_server_that_was_never_read_shows_nothing():
    with pytest.raises(ValueError, match="never read"):
        followed(None)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 2))), min_size=1))
def test_no_sequence_of_readings_gives_negative_growth(readings):
    seen = followed(page(0), *(item and page(*item) for item in readings))
    assert all(value >= 0 for value in seen.counters.values())
    assert seen.to_s >= seen.from_s
    assert bool(seen.lost) == (readings[-1] is None)
