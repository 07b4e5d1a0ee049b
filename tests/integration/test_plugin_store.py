"""Quantized pages on a real vLLM: how many there are, and what it answers over them."""

from pathlib import Path

import pytest
from contracts.forks import forks

pytestmark = pytest.mark.integration

ENGINE = Path(__file__).with_name("store_engine.py")
POOL_BYTES = 256 << 20
LAYERS, HEADS, PAGE = 30, 3, 32

INT8 = {"store": {"format": "int8"}}
FORMATS = {
    # Bytes of a key and a value of 64 channels: codes, and a float32 scale or a float16 norm.
    "int8": (INT8, 2 * (64 + 4)),
    "int4": ({"store": {"format": "int4"}}, 2 * (32 + 4)),
    "turboquant-4": ({"store": {"format": "turboquant"}}, 2 * (32 + 2)),
    "turboquant-3": (
        {"store": {"format": "turboquant", "bits_key": 3, "bits_value": 3}},
        2 * (24 + 2),
    ),
    # Codes, and 4 bytes of range for 32 of them.
    "kivi-4": ({"store": {"format": "kivi"}}, 2 * (32 + 8)),
    "kivi-2": ({"store": {"format": "kivi", "bits_key": 2, "bits_value": 2}}, 2 * (16 + 8)),
}


def story(sentences, seed):
    """Text of about 15 tokens a sentence, no two sentences alike."""
    names, places = ("Ana", "Ivo", "Mia", "Tom", "Lea"), ("mill", "chapel", "barn", "harbour")
    colours, things = (
        ("red", "blue", "green"),
        ("lamp", "key", "kite", "drum", "coat", "cup", "map"),
    )
    return " ".join(
        f"On day {day + seed}, {names[day * seed % 5]} found a {colours[(day + seed) % 3]} "
        f"{things[(day * 3 + seed) % 7]} at the {places[day % 4]}."
        for day in range(1, sentences + 1)
    )


NEEDLE = "The secret number of the lighthouse is 7194."


def question(sentences):
    return (
        f"{story(sentences, 1)} {NEEDLE} {story(sentences, 2)}\n"
        "Question: What is the secret number of the lighthouse?\n"
        "Answer: The secret number of the lighthouse is"
    )


@pytest.fixture(scope="module")
def run(model):
    with forks(ENGINE, model) as ask:

        def run(asked=None, *, calls, tokens=16, **engine):
            return ask({"asked": asked, "calls": calls, "tokens": tokens, "engine": engine})

        yield run


def same_but_for_ties(ours, theirs, tie):
    """Whether answers are the same up to a token whose best two were within `tie` of each other.

    In log probability; after such a token the texts are different ones. Returns how many tokens
    were compared.
    """
    compared = 0
    for call, other_call in zip(ours["best"], theirs["best"], strict=True):
        for answer, other in zip(call, other_call, strict=True):
            for mine, other_best in zip(answer, other, strict=True):
                compared += 1
                (token, score), (_, second) = sorted(mine, key=lambda each: -each[1])[:2]
                (other_token, other_score), *_ = sorted(other_best, key=lambda each: -each[1])
                if token != other_token:
                    assert score - second < tie
                    assert other_token in [number for number, _ in mine]
                    break
                assert score == pytest.approx(other_score, abs=tie)
    return compared


def test_int8_answers_as_stock_vllm_does(run):
    """Prompts that end within a step's 512 tokens and that take several, up to 3,000 tokens."""
    calls = [[story(1, 5), story(9, 3), question(20)], [story(180, 7)]]
    stock, ours = run(calls=calls), run(INT8, calls=calls)
    assert ours["ids"] == stock["ids"]
    # 512 bytes of a float32 key and value, against 136.
    assert ours["size_tokens"] > 3.7 * stock["size_tokens"]


@pytest.mark.parametrize("name", FORMATS)
def test_pages_are_as_small_as_the_format_and_a_hit_answers_as_a_miss(run, name):
    asked, cell_bytes = FORMATS[name]
    prompts = [question(16), story(8, 4)]
    told = run(asked, calls=[prompts, prompts[:1]])
    assert told["blocks"] == POOL_BYTES // (LAYERS * HEADS * PAGE * cell_bytes)
    assert told["size_tokens"] >= (told["blocks"] - 1) * PAGE
    assert told["free_blocks"] == told["blocks"] - 1
    assert told["cached"][0] == [0, 0]
    assert told["cached"][1][0] > 400
    assert told["ids"][1][0] == told["ids"][0][0]
    assert told["texts"][0][0].strip().startswith("7194")
    # The self-test writes a little too, and kivi whole pages only.
    written = told["computed_tokens"] * LAYERS * HEADS * cell_bytes
    assert told["kv_bytes_stored"] == pytest.approx(written, rel=0.15)
    assert told["kv_bytes_read"] > told["kv_bytes_stored"]


@pytest.mark.parametrize("name", ["turboquant-4", "kivi-4"])
def test_four_bits_find_a_needle_in_a_long_prompt(run, name):
    asked, _ = FORMATS[name]
    told = run(asked, calls=[[question(45)]], tokens=6)
    assert told["computed_tokens"] > 1400
    assert told["texts"][0][0].strip().startswith("7194")


@pytest.mark.parametrize("name", ["int8", "kivi-4"])
def test_requests_that_are_preempted_answer_as_if_there_were_room(run, name):
    """Two that grow to 6 and 7 pages in a pool of 11, besides the null page, and in one of many."""
    asked, cell_bytes = FORMATS[name]
    calls = [[story(8, 3), story(9, 4)]]
    limits = {"tokens": 72, "max_model_len": 320, "max_num_batched_tokens": 128}
    roomy = run(asked, calls=calls, **limits)
    page_bytes = LAYERS * HEADS * PAGE * cell_bytes
    crowded = run(asked, calls=calls, kv_cache_memory_bytes=12 * page_bytes, **limits)
    assert crowded["blocks"] == 12
    assert crowded["free_blocks"] == 11
    # What is computed anew comes in other batches, whose sums are rounded otherwise.
    assert same_but_for_ties(crowded, roomy, tie=0.01) > 72
    assert crowded["preemptions"] > roomy["preemptions"] == 0


@pytest.mark.parametrize(
    "others",
    [
        {"quest": {"pages": 4}},
        {"streaming_llm": {"window_tokens": 128, "sink_tokens": 32}},
    ],
    ids=["quest", "streaming-llm"],
)
def test_other_policies_do_with_int8_pages_what_they_do_with_stock_ones(run, others):
    calls = [[story(20, 3), story(1, 5)]]
    over_stock, ours = run(others, calls=calls), run(others | INT8, calls=calls)
    assert same_but_for_ties(ours, over_stock, tie=0.2) > 16
    assert ours["pages_read"] == over_stock["pages_read"] < ours["pages_seen"]
