"""Quest on a real vLLM: nothing but the pages that a decode step reads is other than in stock."""

from pathlib import Path

import pytest
from contracts.forks import forks
from contracts.processor import needs_avx512

pytestmark = pytest.mark.integration

ENGINE = Path(__file__).with_name("quest_engine.py")


def prompt(length, seed):
    return [(position * (7919 + 2 * seed) + seed) % 40_000 + 100 for position in range(length)]


# One takes several steps of 512 tokens, some end in a step with others' decodes, and one in a chunk
# of a single token. The second call finds whole pages of the first in the prefix cache.
LENGTHS = (20, 32, 33, 100, 150, 200, 300, 400, 513, 700, 1000, 6000)
MIXED = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
AGAIN = [MIXED[9] + prompt(40, 20), MIXED[8], MIXED[3] + prompt(500, 21)]


@pytest.fixture(scope="module")
def run(shallow):
    with forks(ENGINE, shallow) as ask:
        yield lambda **asked: ask(asked)


def test_with_a_budget_of_all_pages_answers_are_those_of_stock_vllm(run):
    calls = [MIXED, AGAIN]
    stock = run(quest=None, calls=calls)
    ours = run(quest={"budget_tokens": 8192}, calls=calls)
    assert ours["ids"] == stock["ids"]
    assert ours["cached"] == stock["cached"]
    assert min(ours["cached"][1]) > 0
    assert ours["pages_read"] == ours["pages_seen"] > 0


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"quest": {"pages": 4}}, id="pages"),
        pytest.param({"quest": {"share": 0.3, "per_kv_head": True}}, id="share-per-kv-head"),
        pytest.param(
            {"quest": {"pages": 4}, "kv_cache_dtype": "fp8"}, marks=needs_avx512, id="fp8"
        ),
    ],
)
def test_each_step_reads_the_pages_that_the_reference_engine_would(run, asked):
    calls = [[MIXED[0], MIXED[5], MIXED[8], MIXED[9]], AGAIN]
    told = run(**asked, calls=calls, check=True)
    assert told["rows"] > 300
    # Sums in another order may swap two pages whose scores are equal but for rounding.
    assert told["other_choices"] <= 0.01 * told["rows"]
    if "kv_cache_dtype" not in asked:
        assert told["error"] < 1e-4
    assert told["pages_read"] < 0.6 * told["pages_seen"]
