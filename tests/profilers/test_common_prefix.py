"""How long a beginning prompts have in common."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.common_prefix import COMMON_SHARE, SAMPLED_PROMPTS, CommonPrefix
from kvtune.profilers.fingerprint import fingerprint
from kvtune.types import Request

STEP = 16


def common_of(prompts):
    return fingerprint(
        [Request(token_ids=tuple(prompt), output_tokens=1) for prompt in prompts]
    ).shared_prefix_tokens


def prompt(number, *parts):
    """Runs of (name, tokens), and then tokens that no other prompt has."""
    told = [hash((name, place)) for name, tokens in parts for place in range(tokens)]
    return [*told, *(hash(("own", number, place)) for place in range(100))]


def test_a_system_prompt_is_what_all_have_in_common():
    assert common_of([prompt(n, ("system", 48)) for n in range(10)]) == 48
    assert common_of([prompt(n, ("system", 60)) for n in range(10)]) == 48, "whole blocks"


def test_several_system_prompts_protect_what_most_requests_begin_with():
    both = [prompt(n, ("one", 32) if n % 2 else ("other", 64)) for n in range(20)]
    assert common_of(both) == 64
    most = [prompt(n, ("one", 32) if n % 3 else ("other", 64)) for n in range(30)]
    assert common_of(most) == 32


def test_turns_of_one_conversation_have_no_beginning_in_common_with_others():
    turns = [
        prompt(0, ("system", 32), *((f"{talk} {turn}", 64) for turn in range(turns)))
        for talk in range(30)
        for turns in range(4)
    ]
    assert common_of(turns) == 32


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_prompts_have_nothing_in_common(count):
    expected = None if count == 0 else 0
    assert common_of([prompt(n, ("system", 64)) for n in range(count)]) == expected


def test_lengths_alone_do_not_say_it_and_blocks_do():
    assert fingerprint([Request(input_tokens=64)] * 4).shared_prefix_tokens is None
    blocks = [
        Request(input_tokens=300, prefix_blocks=(7, 8, 100 + n), prefix_block_tokens=64)
        for n in range(8)
    ]
    assert fingerprint(blocks).shared_prefix_tokens == 128


def test_memory_is_bounded_by_the_prompts_that_are_looked_at():
    common = CommonPrefix()
    for number in range(SAMPLED_PROMPTS):
        common.add([1, 2], [16, 32])
        assert common.tokens == (32 if number else 0)
    for number in range(10 * SAMPLED_PROMPTS):
        common.add([1, 10 + number], [16, 32])
    assert common.tokens == 32


@given(
    st.lists(
        st.lists(st.integers(0, 1), max_size=4).map(
            lambda blocks: tuple(token for block in blocks for token in [block] * STEP)
        ),
        min_size=1,
        max_size=25,
    )
)
def test_it_is_the_longest_that_half_begin_with_as_others_do(prompts):
    least = max(2, ceil(COMMON_SHARE * len(prompts)))

    def is_common(one, tokens):
        alike = [p for p in prompts if len(p) >= tokens and p[:tokens] == one[:tokens]]
        return len(one) >= tokens and len(alike) >= least

    expected = 0
    for tokens in range(STEP, 5 * STEP, STEP):
        if 2 * sum(is_common(one, tokens) for one in prompts) >= len(prompts):
            expected = tokens
    assert common_of(prompts) == expected
