"""Windows recorded on a real server (SmolLM2-135M on two cores), as vLLM's counters show them."""

from dataclasses import replace

from kvtune.profilers.window import KV_USAGE, RUNNING, WAITING_CAPACITY, Window
from kvtune.types import EffectiveConfig, Interval, StepTimeModel

WEIGHT_BYTES = 269_000_000  # SmolLM2-135M, 2 bytes a weight
KV_BYTES_PER_TOKEN = 23_040
PEAK_FLOPS_PER_S = 1.32e12  # of the two-core server on which the windows were recorded
PEAK_BYTES_PER_S = 6.7e9


def gauges(*samples):
    """Samples of (waiting, running, KV usage), one every half second."""
    return {
        key: [(index / 2, float(sample[column])) for index, sample in enumerate(samples)]
        for column, key in enumerate((WAITING_CAPACITY, RUNNING, KV_USAGE))
    }


def window(
    *,
    window_s,
    requests,
    prompt,
    answer,
    steps,
    step_tokens,
    samples,
    queue_s=0.0,
    prefill_s=0.0,
    decode_s=0.0,
    preemptions=0,
    tflops_per_s=0.0,
    gbytes_per_s=0.0,
    kv_tokens=None,
    max_num_seqs=None,
    **more,
):
    """A window as vLLM's counters show it. No estimate of work means that it is switched off."""
    counters = {
        'vllm:request_success_total{finished_reason="length"}': requests,
        'vllm:request_success_total{finished_reason="stop"}': 0,
        "vllm:num_preemptions_total": preemptions,
        "vllm:iteration_tokens_total_count": steps,
        "vllm:iteration_tokens_total_sum": step_tokens,
        "vllm:generation_tokens_total": requests * answer,
        "vllm:request_prompt_tokens_sum": requests * prompt,
        "vllm:request_prompt_tokens_count": requests,
        "vllm:request_generation_tokens_sum": requests * answer,
        "vllm:request_generation_tokens_count": requests,
        "vllm:request_queue_time_seconds_sum": queue_s,
        "vllm:request_prefill_time_seconds_sum": prefill_s,
        "vllm:request_decode_time_seconds_sum": decode_s,
        "vllm:request_inference_time_seconds_sum": prefill_s + decode_s,
        "vllm:estimated_flops_per_gpu_total": tflops_per_s * 1e12 * window_s,
        "vllm:estimated_read_bytes_per_gpu_total": gbytes_per_s * 1e9 * window_s,
        "vllm:estimated_write_bytes_per_gpu_total": 0.0,
    }
    shape = {"weight_bytes": WEIGHT_BYTES, "kv_bytes_per_token": KV_BYTES_PER_TOKEN}
    counters |= more.pop("counters", {})
    effective = EffectiveConfig(
        kv_cache_size_tokens=kv_tokens, max_num_seqs=max_num_seqs, **more.pop("effective", {})
    )
    return Window(
        window_s=window_s,
        counters=counters,
        gauges=gauges(*samples),
        effective=effective,
        **{**shape, **more},
    )


PEAKS = {"peak_flops_per_s": PEAK_FLOPS_PER_S, "peak_bytes_per_s": PEAK_BYTES_PER_S}
SMALL_POOL = {"kv_tokens": 3072, "max_num_seqs": 256, **PEAKS}
LARGE_POOL = {"kv_tokens": 182 * 128, "max_num_seqs": 256, **PEAKS}


def capacity(**changed):  # 16 concurrent, 128 in, 256 out, a pool of 3,072 tokens
    return window(
        **{
            "window_s": 133.6,
            "requests": 32,
            "prompt": 128,
            "answer": 256,
            "steps": 894,
            "step_tokens": 12288,
            "samples": [(5, 11, 0.97), (6, 10, 1.0), (0, 9, 0.8), (7, 9, 0.947)],
            "queue_s": 116.5,
            "prefill_s": 26.0,
            "decode_s": 1571.9,
            "preemptions": 30,
            "tflops_per_s": 0.032,
            "gbytes_per_s": 2.3,
            **SMALL_POOL,
            **changed,
        }
    )


def shared_prefix(**changed):  # 4 concurrent, 896 of 1,024 prompt tokens cached, 16 out
    return window(
        **{
            "window_s": 4.95,
            "requests": 12,
            "prompt": 1024,
            "answer": 16,
            "steps": 51,
            "step_tokens": 2624,
            "samples": [(0, 4, 0.083)] * 8 + [(1, 3, 0.06)],
            "queue_s": 0.001,
            "prefill_s": 3.8,
            "decode_s": 12.4,
            "tflops_per_s": 0.152,
            "gbytes_per_s": 4.2,
            **LARGE_POOL,
            **changed,
        }
    )


def long_prompts(**changed):  # 4 concurrent, 3,500 in, 48 out
    return window(
        **{
            "window_s": 36.5,
            "requests": 8,
            "prompt": 3500,
            "answer": 48,
            "steps": 104,
            "step_tokens": 28384,
            "samples": [(2, 2, 0.182), (2, 2, 0.271), (1, 3, 0.453)] + [(0, 4, 0.619)] * 10,
            "queue_s": 10.5,
            "prefill_s": 31.6,
            "decode_s": 92.8,
            "tflops_per_s": 0.306,
            "gbytes_per_s": 2.3,
            **LARGE_POOL,
            **changed,
        }
    )


def prefill_only(**changed):  # 4 concurrent, 1,024 in, 1 out: gauges stay at 0
    return window(
        **{
            "window_s": 7.0,
            "requests": 12,
            "prompt": 1024,
            "answer": 1,
            "steps": 7,
            "step_tokens": 12300,
            "samples": [(0, 0, 0.0)] * 12 + [(1, 0, 0.0)],
            "queue_s": 1.1,
            "prefill_s": 12.4,
            "tflops_per_s": 0.499,
            "gbytes_per_s": 1.8,
            **LARGE_POOL,
            **changed,
        }
    )


def short_decode(**changed):  # 8 concurrent, 32 in, 96 out
    return window(
        **{
            "window_s": 6.5,
            "requests": 8,
            "prompt": 32,
            "answer": 96,
            "steps": 97,
            "step_tokens": 1024,
            "samples": [(0, 8, 0.044)] * 12,
            "queue_s": 0.003,
            "prefill_s": 1.3,
            "decode_s": 48.5,
            "tflops_per_s": 0.041,
            "gbytes_per_s": 4.4,
            **LARGE_POOL,
            **changed,
        }
    )


def long_decode(**changed):  # 8 sequences of 4,000 tokens, long answers
    return window(
        **{
            "window_s": 60.0,
            "requests": 8,
            "prompt": 4000,
            "answer": 400,
            "steps": 800,
            "step_tokens": 8 * 400 + 8 * 500,  # most of the prompts is cached
            "samples": [(0, 8, 0.5)] * 20,
            "prefill_s": 8.0,
            "decode_s": 400.0,
            "tflops_per_s": 0.05,
            "gbytes_per_s": 5.0,
            "kv_tokens": 70_000,
            "max_num_seqs": 256,
            **PEAKS,
            **changed,
        }
    )


def idle(**changed):
    nothing = {"requests": 0, "prompt": 0, "answer": 0, "steps": 0, "step_tokens": 0}
    return window(
        **{"window_s": 5.0, "samples": [(0, 0, 0.0)] * 10, **nothing, **LARGE_POOL, **changed}
    )


SLOW_CORES = {"peak_flops_per_s": 1.0e12, "peak_bytes_per_s": 58e9, "max_num_seqs": 16}


def prefixes_in_turn(**changed):
    """2 concurrent, 40 prompts of 8 prefixes in turn, 768 of 896 tokens each; 33 blocks of 128."""
    return window(
        **{
            "window_s": 35.126,
            "requests": 40,
            "prompt": 896,
            "answer": 8,
            "steps": 180,
            "step_tokens": 36_160,
            "samples": [(0, 2, 0.5)] * 30,
            "prefill_s": 41.6,
            "decode_s": 28.6,
            "kv_tokens": 4224,
            "effective": {"block_size_tokens": 128, "enable_prefix_caching": True},
            "counters": {
                "vllm:prompt_tokens_total": 35_840,
                "vllm:prompt_tokens_cached_total": 0,
                "vllm:prefix_cache_queries_total": 35_840,
                "vllm:prefix_cache_hits_total": 0,
            },
            "reusable_prefix_share": {128: 32 * 768 / 35_840},
            **SLOW_CORES,
            **changed,
        }
    )


def one_prefix(**changed):
    """The same server and lengths, all 40 prompts with one prefix."""
    return prefixes_in_turn(
        **{
            "window_s": 8.333,
            "step_tokens": 5888 + 320,
            "samples": [(0, 2, 0.3)] * 2 + [(0, 0, 0.0)] + [(0, 2, 0.3)] * 2 + [(0, 0, 0.0)],
            "prefill_s": 6.9,
            "decode_s": 9.8,
            "counters": {
                "vllm:prompt_tokens_total": 35_840,
                "vllm:prompt_tokens_cached_total": 29_952,
                "vllm:prefix_cache_queries_total": 35_840,
                "vllm:prefix_cache_hits_total": 29_952,
            },
            "reusable_prefix_share": {128: 39 * 768 / 35_840},
            **changed,
        }
    )


def revisited_prefixes(**changed):
    """48 prompts of 8 prefixes in turn, 896 of 1,024 tokens each; the pool holds four prompts.

    In turn, the oldest block always goes first, so that every prefix is gone when it comes again.
    """
    return window(
        **{
            "window_s": 20.0,
            "requests": 48,
            "prompt": 1024,
            "answer": 16,
            "steps": 420,
            "step_tokens": 48 * 1040,
            "samples": [(0, 2, 0.5)] * 38,
            "queue_s": 0.1,
            "prefill_s": 22.0,
            "decode_s": 14.0,
            "kv_tokens": 4096,
            **SLOW_CORES,
            "effective": {"block_size_tokens": 128, "enable_prefix_caching": True},
            "counters": {
                "vllm:prompt_tokens_total": 48 * 1024,
                "vllm:prompt_tokens_cached_total": 0,
                "vllm:prefix_cache_queries_total": 48 * 1024,
                "vllm:prefix_cache_hits_total": 0,
            },
            "reusable_prefix_share": dict.fromkeys((16, 32, 64, 128), 40 * 896 / (48 * 1024)),
            **changed,
        }
    )


def with_idle_time(seen, times):
    """The window, and `times` as long after it without a request."""
    quiet = {
        key: samples + [(samples[-1][0] + (n + 1) / 2, 0.0) for n in range(times * len(samples))]
        for key, samples in seen.gauges.items()
    }
    return replace(seen, window_s=seen.window_s * (1 + times), gauges=quiet)


def row(verdict, metric):
    return next(item for item in verdict.evidence if item.metric == metric)


def exactly(estimate, spread=0.0):
    """An interval of `spread` to each side, as a share of the estimate."""
    low, high = estimate * (1 - spread), estimate * (1 + spread)
    return Interval(estimate=estimate, low=low, high=high, unit="s")


def step_time(fixed_s, per_sequence_s, per_kv_token_s, *, spread=0.1, **more):
    """A model of a decode step, with the same relative interval everywhere."""
    return StepTimeModel(
        **{
            "source": "probe",
            "fixed_s": exactly(fixed_s, spread),
            "per_sequence_s": exactly(per_sequence_s, spread),
            "per_kv_token_s": exactly(per_kv_token_s, spread),
            "observations": 200,
            "error_share": 0.05,
            **more,
        }
    )


def stepping(**changed):
    """100 steps of 0.1 s, 4 sequences with 1,100 tokens each, 20 prompt tokens a step."""
    return window(
        **{
            "window_s": 10.0,
            "requests": 2,
            "prompt": 1000,
            "answer": 200,
            "steps": 100,
            "step_tokens": 400 + 2000,
            "samples": [(0, 4, 0.3)] * 20,
            "decode_s": 40.0,
            **changed,
        }
    )
