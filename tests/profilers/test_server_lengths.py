"""Lengths from a server's cumulative buckets."""

import pytest

from kvtune.profilers.server_lengths import PROMPTS, server_lengths


def buckets(**cumulative):
    bounds = {"b1": "1.0", "b10": "10.0", "b100": "100.0", "inf": "+Inf"}
    counters = {
        f'{PROMPTS}_bucket{{le="{bounds[key]}"}}': value for key, value in cumulative.items()
    }
    counters[f"{PROMPTS}_count"] = cumulative["inf"]
    return counters


def test_bins_hold_what_each_bucket_adds():
    found = server_lengths({**buckets(b1=0, b10=2, b100=9, inf=9), f"{PROMPTS}_sum": 450}, PROMPTS)
    assert found.edges == (1, 10, 100)
    assert found.counts == (2, 7)
    assert found.mean == 50
    assert found.p95 is None


def test_what_is_beyond_the_last_bound_is_not_lost():
    found = server_lengths(buckets(b1=0, b10=0, b100=1, inf=4), PROMPTS)
    assert found.edges == (10, 100, 200)
    assert found.counts == (1, 3)
    assert found.mean is None


@pytest.mark.parametrize("counters", [{}, buckets(b1=0, b10=0, b100=0, inf=0)])
def test_nothing_is_known_where_no_request_finished(counters):
    assert server_lengths(counters, PROMPTS) is None


def test_another_histogram_is_not_counted_in():
    other = {'vllm:request_prompt_tokens_bucket_of_mine{le="10"}': 3}
    found = server_lengths({**buckets(b1=0, b10=2, b100=2, inf=2)}, PROMPTS)
    assert server_lengths({**buckets(b1=0, b10=2, b100=2, inf=2), **other}, PROMPTS) == found
