import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.prefix_reuse import PrefixReuse

SIZES = (2, 3, 4, 8)


def served_tokens(prompts, size):
    """What a prefix cache does, block by block, with all blocks ever seen."""
    cached = set()
    served = 0
    for prompt in prompts:
        blocks = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        for block in blocks:
            if block not in cached:
                break
            served += size
        cached.update(blocks)
    return served


def shares(prompts, sizes):
    total = sum(map(len, prompts))
    return {size: served_tokens(prompts, size) / total for size in sizes}


prompts_of_few_tokens = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12
)


@settings(deadline=None)
@given(prompts_of_few_tokens)
def test_known_tokens_are_reused_as_a_cache_would(prompts):
    reuse = PrefixReuse(SIZES)
    for prompt in prompts:
        reuse.add_tokens(prompt)
    assert reuse.shares() == pytest.approx(shares(prompts, SIZES))
    assert not reuse.sampled


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1, 2, 4, 6]),
)
def test_hashed_blocks_are_reused_as_their_tokens_would(parts, block_tokens):
    """Full blocks and a tail of its own; block sizes may divide, be divided, or neither."""
    reuse = PrefixReuse(SIZES)
    prompts = []
    for number, (blocks, tail) in enumerate(parts):
        prompt = [(block, place) for block in blocks for place in range(block_tokens)]
        prompts.append([*prompt, *((number, "own", place) for place in range(tail))])
        reuse.add_blocks(blocks, block_tokens, len(prompts[-1]))
    assert reuse.shares() == pytest.approx(shares(prompts, SIZES))


def test_a_partial_last_block_is_shared_only_at_the_same_length():
    def share(first_tokens, second_tokens):
        reuse = PrefixReuse((16,))
        reuse.add_blocks((1, 2), 512, first_tokens)
        reuse.add_blocks((1, 2), 512, second_tokens)
        return reuse.shares()[16] * (first_tokens + second_tokens)

    assert share(600, 600) == pytest.approx(592)
    assert share(600, 640) == pytest.approx(512)
    assert share(1024, 1024) == pytest.approx(1024)


def test_blocks_of_different_sizes_are_not_the_same():
    reuse = PrefixReuse((16,))
    reuse.add_blocks((1,), 16, 16)
    reuse.add_blocks((1,), 32, 32)
    assert reuse.shares() == {16: 0.0}


def test_nothing_is_known_without_prompts():
    assert PrefixReuse((16,)).shares() == {}


def conversations(seed, first_id, requests=4000):
    """Growing conversations, a system prompt in most of them, and single prompts."""
    rng = random.Random(seed)
    next_id = first_id + 2
    history = []
    for _ in range(requests):
        blocks = [first_id, first_id + 1] if rng.random() < 0.8 else []
        if history and rng.random() < 0.5:
            blocks = list(rng.choice(history[-50:]))
        new = rng.randint(1, 10)
        blocks += range(next_id, next_id + new)
        next_id += new
        history.append(blocks)
        yield blocks


def estimate(first_id, tracked_blocks):
    reuse = PrefixReuse((16, 64), tracked_blocks)
    for blocks in conversations(0, first_id):
        reuse.add_blocks(blocks, 16, 16 * len(blocks))
    return reuse


def test_a_sample_estimates_the_share_without_bias():
    exact = estimate(0, 1_000_000)
    assert not exact.sampled
    # The same prompts under other ids: other hashes, so another sample.
    samples = [estimate(first_id, 500) for first_id in range(0, 20 << 30, 1 << 30)]
    assert all(sample.sampled for sample in samples)
    for size, share in exact.shares().items():
        estimates = [sample.shares()[size] for sample in samples]
        deviation = statistics.stdev(estimates)
        assert deviation < 0.1
        assert statistics.mean(estimates) == pytest.approx(share, abs=4 * deviation / 20**0.5)


def test_a_prefix_that_all_share_is_never_left_to_the_sample():
    reuse = PrefixReuse((16,), 1000)
    for number in range(20_000):
        reuse.add_blocks((-1, *range(9 * number, 9 * number + 9)), 16, 160)
    assert reuse.sampled
    assert reuse.shares()[16] == pytest.approx(0.1, rel=0.001)


def test_the_number_of_blocks_that_are_kept_is_bounded():
    reuse = PrefixReuse((16,), 1000)
    for blocks in conversations(1, 0, 2000):
        reuse.add_blocks(blocks, 16, 16 * len(blocks))
        assert len(reuse._seen) <= 1000
