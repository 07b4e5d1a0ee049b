"""The simulated engine's paged cache: sharing and reuse of blocks."""

from __future__ import annotations

from cache_bench import Bench, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.simulated.blocks import BlockPool, prefix_hashes
from kvtune.engines.simulated.scheduler import Limits


@given(
    tokens=st.lists(st.integers(0, 5), max_size=50),
    other=st.lists(st.integers(0, 5), max_size=50),
    block_tokens=st.integers(1, 8),
)
def test_block_hashes_agree_exactly_as_far_as_the_tokens_do(
    tokens: list[int], other: list[int], block_tokens: int
) -> None:
    ours, theirs = prefix_hashes(tokens, block_tokens), prefix_hashes(other, block_tokens)
    assert len(ours) == len(tokens) // block_tokens
    for index, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_tokens
        assert (mine == yours) == (tokens[:end] == other[:end])


def test_identical_prompts_of_48_tokens_share_32_in_blocks_of_16() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    first = bench.add(prompt, 1)
    bench.run()
    second = bench.add(prompt, 1)
    bench.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert bench.scheduler.prefix_queries_tokens == 96
    assert bench.scheduler.prefix_hits_tokens == 32


def test_a_prefix_is_shared_by_requests_admitted_in_the_same_step() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 5)
    bench.add(prompt, 5)
    assert bench.step() == [(1, 48), (2, 16)]
    assert bench.pool.used == 4  # two shared, and the last block of each


def test_prompts_that_differ_in_their_first_token_share_nothing() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 1)
    bench.run()
    other = bench.add([prompt[0] + 1, *prompt[1:]], 1)
    bench.run()
    assert other.cached_tokens == 0


def test_another_salt_does_not_find_the_prefix() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 1, salt="a")
    bench.run()
    assert bench.pool.find(prefix_hashes(prompt, 16, "b")) == []
    assert len(bench.pool.find(prefix_hashes(prompt, 16, "a"))) == 3


def test_nothing_is_found_without_prefix_caching() -> None:
    bench = Bench(20, 16, Limits(token_budget=2048, max_active=8, prefix_caching=False))
    bench.add(tokens_of(1, 48), 1)
    bench.run()
    second = bench.add(tokens_of(1, 48), 1)
    bench.run()
    assert second.cached_tokens == 0
    assert bench.scheduler.prefix_queries_tokens == 0


def test_the_end_of_the_prompt_released_longest_ago_is_reused_first() -> None:
    pool = BlockPool(6, caching=True)
    old, new = pool.take(2), pool.take(2)
    for block, value in zip(old + new, (10, 11, 20, 21), strict=True):
        pool.remember(block, value)
    pool.release(old)
    pool.release(new)
    pool.take(1)  # the block that was never used goes first
    assert pool.find([10, 11]) == old
    pool.take(1)
    assert pool.find([10, 11]) == old[:1]
    pool.take(1)
    assert pool.find([10, 11]) == []
    assert pool.find([20, 21]) == new


def test_a_prefix_that_is_used_again_outlives_one_that_is_not() -> None:
    pool = BlockPool(3, caching=True)
    first, second = pool.take(1), pool.take(1)
    pool.remember(first[0], 1)
    pool.remember(second[0], 2)
    pool.release(first)
    pool.release(second)
    pool.hold(pool.find([1]))
    pool.release(first)
    pool.take(1)
    assert pool.find([1]) == first
    assert pool.find([2]) == []


def test_blocks_that_nobody_could_find_are_reused_before_those_that_hold_a_prefix() -> None:
    pool = BlockPool(4, caching=True)
    known, unknown, _ = pool.take(3)
    pool.remember(known, 1)
    pool.release([known])
    pool.release([unknown])
    assert pool.take(1) == [unknown]


def test_the_cache_is_not_reset_while_blocks_are_held() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.take(1)
    pool.remember(blocks[0], 7)
    assert not pool.reset_cache()
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.find([7]) == []
    assert pool.free == 3
