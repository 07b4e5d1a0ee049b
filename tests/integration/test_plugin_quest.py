"""Quest on a real vLLM: nothing but the pages that a decode step reads is other than in stock."""

import functools

import pytest
from contracts.answers import assert_same
from contracts.processor import needs_avx512

pytestmark = pytest.mark.integration

PAGE = 32


def prompt(length, seed):
    return [(position * (7919 + 2 * seed) + seed) % 40_000 + 100 for position in range(length)]


# One takes several steps of 512 tokens, some end in a step with others' decodes, and one in a chunk
# of a single token. The second call finds whole pages of the first in the prefix cache.
LENGTHS = (20, 32, 33, 100, 150, 200, 300, 400, 513, 700, 1000, 2600)
MIXED = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
AGAIN = [MIXED[9] + prompt(40, 20), MIXED[8], MIXED[3] + prompt(500, 21)]


@pytest.fixture
def run(ask, shallow):
    return functools.partial(ask, "quest_engine", shallow)


def test_with_a_budget_of_all_pages_answers_are_those_of_stock_vllm(run):
    calls = [MIXED, AGAIN]
    stock = run(asked={}, calls=calls)
    ours = run(asked={"quest": {"budget_tokens": 8192}}, calls=calls)
    assert_same(ours["calls"], stock["calls"])
    assert [call["cached"] for call in ours["calls"]] == [c["cached"] for c in stock["calls"]]
    assert min(ours["calls"][1]["cached"]) > 0
    assert ours["pages_read"] == ours["pages_seen"] > 0


PAGES, SHARE = {"quest": {"pages": 4}}, {"quest": {"share": 0.3, "per_kv_head": True}}
INT8 = {"store": {"format": "int8"}}


@pytest.mark.parametrize(
    ("asked", "kv_cache_dtype"),
    [
        pytest.param(PAGES, "auto", id="pages"),
        pytest.param(SHARE, "auto", id="share-per-kv-head"),
        pytest.param(PAGES | INT8, "auto", id="int8-store"),
        pytest.param(SHARE | INT8, "auto", id="int8-store-per-kv-head"),
        pytest.param(PAGES, "fp8", marks=needs_avx512, id="fp8"),
    ],
)
def test_each_step_reads_the_pages_that_the_reference_engine_would(run, asked, kv_cache_dtype):
    calls = [[MIXED[0], MIXED[5], MIXED[8], MIXED[9]], AGAIN]
    told = run(asked=asked, kv_cache_dtype=kv_cache_dtype, calls=calls, check=True)
    assert told["rows"] > 300
    # Sums in another order may swap two pages whose scores are equal but for rounding.
    assert told["missed"] < 1e-5
    if kv_cache_dtype == "auto":
        assert told["error"] < 1e-4
    assert told["pages_read"] < 0.6 * told["pages_seen"]


# Two that grow to 7 and 8 pages in a pool of 13.
GROWING = [prompt(150, 30), prompt(170, 31)]
ROOMY = {"calls": [GROWING], "tokens": 72, "max_model_len": 256}
TIGHT = ROOMY | {"num_gpu_blocks_override": 14}


def test_preempted_requests_are_answered_as_by_stock_vllm_with_a_budget_of_all_pages(run):
    stock = run(asked={}, **ROOMY)
    ours = run(asked={"quest": {"budget_tokens": 8192}}, **TIGHT)
    assert max(ours["preempted"]) > 0, "nobody was preempted after its first token"
    assert_same(ours["calls"], stock["calls"])


def test_preempted_requests_read_again_what_they_would_with_room(run):
    roomy, tight = run(asked=PAGES, **ROOMY), run(asked=PAGES, check=True, **TIGHT)
    assert roomy["preempted"] == []
    assert max(tight["preempted"]) > PAGE, "no page of an answer was computed again"
    assert_same(tight["calls"], roomy["calls"])
    assert tight["missed"] < 1e-5
    assert tight["error"] < 1e-4
    # In three layers, each token of the answers but the first, and those that came again.
    assert tight["rows"] == 3 * (2 * 71 + sum(count - 1 for count in tight["preempted"]))
