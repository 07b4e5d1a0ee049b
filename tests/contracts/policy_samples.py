"""Situations in which a policy is asked: machines, models and workloads."""

from kvtune import __version__
from kvtune.kernels.device import DeviceDetail
from kvtune.policies.base import Context
from kvtune.policies.model_shape import ModelShape
from kvtune.types import Device, EffectiveConfig, EngineInfo, Histogram, WorkloadFingerprint

MIB = 1 << 20
GIB = 1 << 30

SMOLLM2 = ModelShape(
    architecture="LlamaForCausalLM",
    layers=30,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    dtype_bytes=2,
    max_tokens=8192,
    vocab_size=49152,
)
LLAMA_8B = ModelShape("LlamaForCausalLM", 32, 32, 8, 128, 2, 131072, 128256)


def engine(platform, plugin=None):
    return EngineInfo(
        name="vllm",
        version="0.32.0",
        distribution="vllm",
        platform=platform,
        python=None,
        plugin=plugin,
    )


WITH_PLUGIN = engine("cpu", plugin=__version__)


def lengths(p50, p95):
    return Histogram(edges=(0.0, 1e5), counts=(1,), mean=p50, p50=p50, p95=p95, p99=p95)


def workload(input_p50=300.0, input_p95=500.0, output_p50=60.0, reuse=None, shared=None):
    return WorkloadFingerprint(
        requests=100,
        input_tokens=lengths(input_p50, input_p95),
        output_tokens=lengths(output_p50, output_p50 * 2),
        duration_s=None,
        request_rate_per_s=None,
        burstiness=None,
        reusable_prefix_share=reuse or {},
        shared_prefix_tokens=shared,
    )


def on_cpu(**changes):
    """SmolLM2 on two cores; nothing else is known."""
    facts = {
        "engine": engine("cpu"),
        "device": Device(kind="cpu", name="a CPU", count=2, memory_bytes=24 * GIB),
        "model": SMOLLM2,
        "detail": DeviceDetail(None, frozenset({"avx512f", "amx_tile"})),
    }
    return Context(**{**facts, **changes})


def on_gpu(**changes):
    """Llama 3.1 8B on an H100; nothing else is known."""
    facts = {
        "engine": engine("cuda"),
        "device": Device(kind="cuda", name="NVIDIA H100 80GB", count=1, memory_bytes=80 * GIB),
        "model": LLAMA_8B,
        "detail": DeviceDetail((9, 0), frozenset()),
    }
    return Context(**{**facts, **changes})


SITUATIONS = {
    "cpu, nothing known": on_cpu(model=None, detail=None),
    "cpu, scarce pool": on_cpu(
        max_concurrency=12,
        base_arguments={"kv-cache-memory-bytes": 64 * MIB, "max-model-len": 1024},
        fingerprint=workload(reuse={32: 0.6, 64: 0.5, 128: 0.4}),
    ),
    "cpu, long prompts": on_cpu(
        max_concurrency=4,
        fingerprint=workload(input_p50=2500.0, input_p95=3500.0, reuse={128: 0.0}),
        base_arguments={"max-num-seqs": 64, "kv-cache-memory-bytes": "512M"},
    ),
    "cpu, long prompts and the plugin": on_cpu(
        engine=WITH_PLUGIN,
        fingerprint=workload(input_p50=2500.0, input_p95=5000.0, shared=700),
        base_arguments={"kv-cache-memory-bytes": "512M"},
    ),
    "cpu, shared prefixes and the plugin": on_cpu(
        engine=WITH_PLUGIN,
        fingerprint=workload(reuse={128: 0.5}),
        base_arguments={"kv-cache-memory-bytes": "512M"},
    ),
    "cpu, one at a time": on_cpu(max_concurrency=1, fingerprint=workload()),
    "gpu, nothing known": on_gpu(model=None, detail=None),
    "gpu, wide load": on_gpu(
        max_concurrency=200,
        fingerprint=workload(input_p50=4000.0, input_p95=12000.0),
        baseline=EffectiveConfig(
            num_gpu_blocks=20000,
            block_size_tokens=16,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len_tokens=32768,
        ),
    ),
    "gpu, limited, whole prompts": on_gpu(
        base_arguments={
            "kv-cache-memory-bytes": 8 * GIB,
            "enable-chunked-prefill": False,
            "max-model-len": "4K",
        },
    ),
}
