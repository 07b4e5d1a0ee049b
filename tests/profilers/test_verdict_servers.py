"""Verdicts on servers that name their metrics otherwise or run several engines."""

from dataclasses import replace

import pytest
from contracts.windows import (
    capacity,
    idle,
    long_prompts,
    prefixes_in_turn,
    row,
    short_decode,
)

from kvtune.profilers.scrape import counters_delta, parse_metrics
from kvtune.profilers.verdict import judge
from kvtune.profilers.window import KV_USAGE, Window
from kvtune.types import Bottleneck, EffectiveConfig

OLD_PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 8.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 5.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{{engine="0",model_name="m"}} 0.2
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {queries}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {finished}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} {computed}
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_sum{{engine="0",model_name="m"}} {queries}
vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {finished}
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} {prefill_s}
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum{{engine="0",model_name="m"}} {decode_s}
"""


def test_names_of_an_old_version_are_understood():
    """Names of vLLM 0.10 and before: no reasons of waiting, gpu_ before cache metrics."""
    none = dict.fromkeys(
        ("queries", "hits", "generated", "finished", "computed", "steps", "prefill_s", "decode_s"),
        0,
    )
    later = {
        "queries": 49_152,
        "hits": 4_915,
        "generated": 768,
        "finished": 48,
        "computed": 49_920,  # cached prompt tokens were counted then
        "steps": 420,
        "prefill_s": 22,
        "decode_s": 14,
    }
    before, after = (parse_metrics(OLD_PAGE.format(**values)) for values in (none, later))
    seen = Window(
        window_s=20.0,
        counters=counters_delta(before, after),
        gauges={key: [(i / 2, value) for i in range(40)] for key, value in after.gauges.items()},
        effective=EffectiveConfig(
            kv_cache_size_tokens=4096, max_num_seqs=256, block_size_tokens=128
        ),
        reusable_prefix_share={128: 0.73},
    )
    verdict = judge(seen)
    assert row(verdict, "peak_kv_usage").value == 0.2
    assert row(verdict, "waiting_sample_share").value == 1.0
    # 0.73 less a block of 128 in prompts of 1,024, less 10% of hits.
    assert row(verdict, "reusable_prefix_missed").value == pytest.approx(0.505, abs=1e-4)
    assert verdict.bottleneck is Bottleneck.PREFIX_THRASH


def several(seen, engines, fullest=None):
    more = {"kvtune:engines": [(0.0, float(engines))]}
    if fullest is not None:
        more['vllm:kv_cache_usage_perc{engines="fullest"}'] = [
            (at_s, fullest) for at_s, _ in seen.gauges[KV_USAGE]
        ]
    return replace(seen, gauges={**seen.gauges, **more})


def test_limits_of_several_engines_add_up():
    seen = short_decode(max_num_seqs=4, queue_s=30.0, samples=[(6, 4, 0.1)] * 9)
    assert judge(several(seen, 1)).bottleneck is Bottleneck.BATCH_WIDTH
    assert judge(several(seen, 2)).bottleneck is not Bottleneck.BATCH_WIDTH


def test_one_full_engine_is_capacity_though_the_mean_has_room():
    seen = short_decode(queue_s=30.0, samples=[(6, 8, 0.5)] * 9)
    assert judge(several(seen, 2, fullest=0.5)).bottleneck is not Bottleneck.KV_CAPACITY
    assert judge(several(seen, 2, fullest=0.98)).bottleneck is Bottleneck.KV_CAPACITY


def test_two_engines_have_twice_the_time():
    one, two = short_decode(), several(short_decode(), 2)
    assert row(judge(one), "weight_reads_of_ceiling").value == pytest.approx(0.599, abs=1e-3)
    assert row(judge(two), "weight_reads_of_ceiling").value == pytest.approx(0.2996, abs=1e-3)


@pytest.mark.parametrize(
    ("seen", "bottleneck"),
    [
        (idle(), Bottleneck.IDLE),
        (capacity(), Bottleneck.KV_CAPACITY),
        (
            long_prompts(prompt=9000, samples=[(2, 1, 0.39), (1, 2, 0.62)] * 4),
            Bottleneck.KV_CAPACITY,
        ),
        (prefixes_in_turn(), Bottleneck.PREFIX_THRASH),
        (
            short_decode(max_num_seqs=8, queue_s=30.0, samples=[(6, 8, 0.1)] * 9),
            Bottleneck.BATCH_WIDTH,
        ),
    ],
    ids=["idle", "preempted", "no room", "thrash", "slots"],
)
def test_what_counters_tell_needs_neither_ceilings_nor_the_checkpoint(seen, bottleneck):
    known = judge(seen)
    bare = judge(
        replace(
            seen,
            peak_flops_per_s=None,
            peak_bytes_per_s=None,
            weight_bytes=None,
            kv_bytes_per_token=None,
        )
    )
    assert known.bottleneck is bare.bottleneck is bottleneck
    assert (known.confidence, known.summary) == (bare.confidence, bare.summary)
