"""Hits in the prefix cache that no request of a run made possible."""

import pytest

from kvtune.autotune.contamination import contamination, reusable_share
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import EffectiveConfig, FailureClass, LoadRun, Request

PLAN = LoadPlan(ClosedLoop(4))
CONFIG = EffectiveConfig(engine_version="1", block_size_tokens=32, max_model_len_tokens=2048)
UNLIKE = [Request(input_tokens=512, output_tokens=8) for _ in range(4)]
SHARED = [
    Request(input_tokens=640, output_tokens=8, prefix_blocks=(1,), prefix_block_tokens=512)
] * 4
"""Three of four find 512 of 640 tokens: 60%."""


def run_with(cached, prompts=2048.0):
    counters = {
        "vllm:prompt_tokens_total": prompts,
        "vllm:prompt_tokens_cached_total": cached,
    }
    return LoadRun((), 1.0, 0.0, counters, {})


def test_what_requests_share_with_each_other_is_no_contamination():
    assert contamination(run_with(0.60 * 2048), SHARED, PLAN, CONFIG) is None
    assert contamination(run_with(0.20 * 2048), SHARED, PLAN, CONFIG) is None
    assert contamination(run_with(0.0), UNLIKE, PLAN, CONFIG) is None


def test_hits_beyond_that_are():
    failure = contamination(run_with(0.75 * 2048), SHARED, PLAN, CONFIG)
    assert failure.failure is FailureClass.CONTAMINATED
    assert "15% of the prompt tokens" in failure.message
    assert contamination(run_with(0.1 * 2048), UNLIKE, PLAN, CONFIG) is not None


@pytest.mark.parametrize(
    ("load", "config", "run"),
    [
        ([*UNLIKE, Request(prompt="Only the server knows its tokens.")], CONFIG, run_with(2048.0)),
        (UNLIKE, None, run_with(2048.0)),
        (UNLIKE, CONFIG, LoadRun((), 1.0, 0.0, {}, {})),
    ],
)
def test_where_something_is_not_known_nothing_is_said(load, config, run):
    assert contamination(run, load, PLAN, config) is None


def test_prompts_are_taken_as_the_context_cuts_them():
    long = [
        Request(input_tokens=4096, output_tokens=48, prefix_blocks=(1,), prefix_block_tokens=1024)
    ] * 2
    # The second one finds 1,024 of its 2,000 tokens, not of 4,096.
    assert share(long, 16, 2048) == pytest.approx(1024 / 4000)
    assert share(long, 16, None) == pytest.approx(1024 / 8192)


def share(load, block_tokens, most_tokens):
    return reusable_share(load, PLAN, block_tokens=block_tokens, max_model_len_tokens=most_tokens)


def test_what_is_cut_inside_a_shared_block_is_shared_up_to_there():
    # Both hold the same document; what room its answer leaves is all that differs.
    load = [
        Request(
            input_tokens=4096,
            output_tokens=48 + 16 * number,
            prefix_blocks=(1, 2),
            prefix_block_tokens=1536,
        )
        for number in range(2)
    ]
    prompts = 2000.0 + 1984.0
    found = run_with(1984.0, prompts)
    assert contamination(found, load, PLAN, CONFIG) is None


def test_blocks_that_are_smaller_than_usual_serve_more():
    # 12 shared tokens of 24: one block of 8, and none of 16.
    load = [
        Request(input_tokens=24, output_tokens=8, prefix_blocks=(1,), prefix_block_tokens=12)
    ] * 8
    small = CONFIG.model_copy(update={"block_size_tokens": 8})
    assert contamination(run_with(7 * 8.0, 8 * 24.0), load, PLAN, small) is None
    assert contamination(run_with(8 * 8.0, 8 * 24.0), load, PLAN, small) is not None


def test_a_prompt_that_goes_on_after_another_may_find_its_answer_in_the_cache():
    first = tuple(range(1000, 1128))
    answer = tuple(range(2000, 2064))
    load = [Request(token_ids=first), Request(token_ids=(*first, *answer, 3000, 3001))]
    prompts = 128.0 + 194.0
    # 128 tokens of the first prompt, and 64 of what was answered to it.
    assert contamination(run_with(192.0, prompts), load, PLAN, CONFIG) is None
    alone = [Request(token_ids=first), Request(token_ids=answer)]
    assert contamination(run_with(64.0, 192.0), alone, PLAN, CONFIG) is not None
