"""Where a search looks first: at what the verdict says could help, one move at a time."""

import pytest

from kvtune.autotune.guesses import first_guesses
from kvtune.autotune.space import SearchSpace, SpaceKnob
from kvtune.policies.base import Knob
from kvtune.types import Bottleneck

DEFAULTS = {"block_size": 128, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


def space_of(*names):
    knobs = {
        "block_size": Knob.log2("block_size", 32, 256, default=128, unit="tokens", because="b"),
        "max_num_seqs": Knob.log2("max_num_seqs", 8, 128, default=32, unit="", because="b"),
        "max_num_batched_tokens": Knob.log2(
            "max_num_batched_tokens", 512, 4096, default=2048, unit="tokens", because="b"
        ),
    }
    return SearchSpace(tuple(SpaceKnob(name, knobs[name], None, "b") for name in names), {})


WHOLE = space_of(*DEFAULTS)


def moves(guess):
    return {name: value for name, value in guess.items() if value != DEFAULTS[name]}


def test_a_lack_of_capacity_asks_for_small_blocks_alone_first():
    guesses = [moves(guess) for guess in first_guesses(WHOLE, Bottleneck.KV_CAPACITY)]
    assert guesses[0] == {"block_size": 32}
    assert all(guess["block_size"] == 32 for guess in guesses)


def test_a_narrow_batch_asks_for_a_wide_one():
    assert moves(first_guesses(WHOLE, Bottleneck.BATCH_WIDTH)[0]) == {"max_num_seqs": 128}


def test_weight_reads_ask_for_a_wide_batch_and_thrash_for_a_narrow_one():
    assert moves(first_guesses(WHOLE, Bottleneck.WEIGHT_BANDWIDTH)[0]) == {"max_num_seqs": 128}
    assert moves(first_guesses(WHOLE, Bottleneck.PREFIX_THRASH)[0]) == {"max_num_seqs": 8}


def test_compute_asks_for_both_ends_of_the_step_size():
    guesses = [moves(guess) for guess in first_guesses(WHOLE, Bottleneck.COMPUTE)]
    assert guesses == [{"max_num_batched_tokens": 4096}, {"max_num_batched_tokens": 512}]


@pytest.mark.parametrize("bottleneck", Bottleneck)
def test_a_guess_is_a_point_of_the_space_named_once_and_never_the_defaults(bottleneck):
    guesses = first_guesses(WHOLE, bottleneck)
    assert all(set(guess) == set(DEFAULTS) and moves(guess) for guess in guesses)
    assert len({tuple(guess.items()) for guess in guesses}) == len(guesses)
    for guess in guesses:
        assert all(guess[entry.knob.name] in entry.knob.choices for entry in WHOLE.knobs)


@pytest.mark.parametrize("bottleneck", [Bottleneck.ABSTAIN, Bottleneck.IDLE, Bottleneck.OVERHEAD])
def test_without_a_hint_there_are_no_guesses(bottleneck):
    assert first_guesses(WHOLE, bottleneck) == []


def test_what_the_space_does_not_have_is_not_guessed():
    assert first_guesses(space_of("max_num_seqs"), Bottleneck.COMPUTE) == []
    small = space_of("max_num_seqs")
    assert [g for g in first_guesses(small, Bottleneck.KV_CAPACITY) if "block_size" in g] == []
