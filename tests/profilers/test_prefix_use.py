"""What the counters of a prefix cache say, and what they don't."""

from dataclasses import replace

import pytest
from contracts.windows import revisited_prefixes
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.prefix_use import prefix_use
from kvtune.profilers.window import CACHED, HITS, PROMPTS, QUERIES


def use_of(counters, **changed):
    return prefix_use(revisited_prefixes(counters=counters, **changed))


def test_tokens_counted_once_a_request_are_preferred_to_lookups():
    counted = {PROMPTS: 1000, QUERIES: 5000, HITS: 4000, CACHED: 100}
    assert use_of(counted).hits == pytest.approx(0.1)
    assert use_of({**counted, CACHED: 0}).hits == 0.0


@pytest.mark.parametrize(("queries", "hits"), [(1000, 0.3), (1040, 300 / 1040), (1060, None)])
def test_hits_of_repeated_lookups_are_unknown(queries, hits):
    seen = revisited_prefixes()
    counters = {key: value for key, value in seen.counters.items() if key != CACHED}
    counters |= {PROMPTS: 1000, QUERIES: queries, HITS: 300}
    assert prefix_use(replace(seen, counters=counters)).hits == pytest.approx(hits)


@pytest.mark.parametrize(
    ("block_tokens", "shares", "reusable"),
    [
        (128, {128: 0.725}, 0.6),
        (128, {16: 0.9, 128: 0.725, 256: 0.7}, 0.6),
        (64, {16: 0.9, 256: 0.7}, 0.7 - 64 / 1024),  # 256 is a multiple of 64, 16 is not
        (784, {16: 0.9, 512: 0.5}, None),
        (128, {128: 0.05}, 0.0),
        (None, {128: 0.7}, None),
    ],
)
def test_reusable_share_is_a_lower_bound_less_a_block(block_tokens, shares, reusable):
    use = use_of({}, effective={"block_size_tokens": block_tokens}, reusable_prefix_share=shares)
    assert use.reusable == (None if reusable is None else pytest.approx(reusable))


@pytest.mark.parametrize(
    ("block_tokens", "below"), [(16, 0.0), (100, 0.1), (128, 0.6), (784, 0.7), (8, None)]
)
def test_what_only_smaller_blocks_could_serve(block_tokens, below):
    shares = {16: 0.8, 64: 0.7, 128: 0.2, 512: 0.1}
    use = use_of({}, effective={"block_size_tokens": block_tokens}, reusable_prefix_share=shares)
    assert use.below_blocks == (None if below is None else pytest.approx(below))


def test_avoidable_is_a_share_of_what_was_computed():
    # 25% of hits, 60% reusable: 35 of the 75 computed tokens of a hundred.
    use = use_of({PROMPTS: 1000, CACHED: 250}, reusable_prefix_share={128: 0.725})
    assert use.missed == pytest.approx(0.35)
    assert use.avoidable == pytest.approx(0.35 / 0.75)


def test_engines_hold_blocks_of_their_own():
    one = revisited_prefixes()
    two = replace(one, gauges={**one.gauges, "kvtune:engines": [(0.0, 2.0)]})
    assert prefix_use(one).turnover == pytest.approx(48 * 1040 / 4096)
    assert prefix_use(two).turnover == pytest.approx(48 * 1040 / 8192)


def sampled(queries, hits):
    seen = revisited_prefixes()
    series = {QUERIES: queries, HITS: hits}
    samples = {key: [(float(i), v) for i, v in enumerate(vs)] for key, vs in series.items()}
    return prefix_use(replace(seen, gauges={**seen.gauges, **samples})).fall


def test_fall_compares_the_halves_of_the_lookups_not_of_the_time():
    # Nothing is asked for in the last half of the time; 400 lookups with 75% hits, then with 25%.
    queries = [0, 100, 200, 300, 400, 500, 600, 700, 800] + [800] * 8
    hits = [0, 75, 150, 225, 300, 325, 350, 375, 400] + [400] * 8
    assert sampled(queries, hits) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("queries", "hits"),
    [
        ([0, 100, 200, 300, 400], [0, 90, 180, 190, 200]),  # two lookups a half
        ([0, 100, 200, 300, 50, 100, 200, 300, 400, 500], [0] * 10),  # restarted
        ([], []),
        ([0] * 12, [0] * 12),
    ],
)
def test_fall_is_unknown_where_little_or_nothing_was_asked(queries, hits):
    assert sampled(queries, hits) is None


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1)), max_size=40))
def test_fall_is_a_difference_of_shares(lookups):
    queries, hits = [0.0], [0.0]
    for asked, share in lookups:
        queries.append(queries[-1] + asked)
        hits.append(hits[-1] + asked * share)
    fall = sampled(queries, hits)
    assert fall is None or -1 - 1e-9 <= fall <= 1 + 1e-9


def test_prefix_caching_that_is_off_misses_nothing():
    effective = {"block_size_tokens": 128, "enable_prefix_caching": False}
    assert use_of({}, effective=effective).missed is None
