"""Quantized pages on a real vLLM: how many there are, and what it answers over them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    with subprocess.Popen(
        [sys.executable, ENGINE, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(asked=None, **engine):
            calls = engine.pop("calls")
            process.stdin.write(json.dumps({"asked": asked, "calls": calls, "engine": engine}))
            process.stdin.write("\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            assert "failed" not in told, "vLLM ended; its log is above"
            return told

        yield run
        process.stdin.close()


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
    assert ours["ids"] == over_stock["ids"]
    assert ours["pages_read"] == over_stock["pages_read"] < ours["pages_seen"]
