"""`kvtune doctor`: what is usable here, and the fix for what is not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from kvtune.kernels.nvml import GpuSample
    from kvtune.types import Ceilings, Device, EngineInfo

EPILOG = "Example: kvtune doctor --model ./model"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that kvtune can use. `ok` is None where it is optional and absent."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def doctor(
    model: Annotated[
        str | None, typer.Option("--model", help="Also check this checkpoint directory.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure what the device reaches (seconds), and keep it."),
    ] = False,
    engine_python: options.EnginePython = None,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Check Python, vLLM and plugin, torch, GPU, history and model; exit code 2 if one is broken.

    Ceilings are the memory bandwidth and the matrix rate that the device reached with --measure.
    """
    from json import dumps

    from rich.markup import escape

    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.kernels.device import detect_device

    device = detect_device()
    checks = [
        _python(),
        *_engine(engine_python),
        *_device(device),
        _history(store),
        _ceilings(device, store, measure),
        *([_model(model)] if model is not None else []),
    ]
    if json:
        print_json(dumps([asdict(check) for check in checks]))
    else:
        for check in checks:
            mark = {True: "[green]ok  [/green]", False: "[red]bad [/red]", None: "[dim]none[/dim]"}
            stdout.print(f"{mark[check.ok]} {check.name:<8} {escape(check.found)}", soft_wrap=True)
            if check.fix:
                stdout.print(f"              fix: {escape(check.fix)}", soft_wrap=True)
    if any(check.ok is False for check in checks):
        raise typer.Exit(2)


def _python() -> Check:
    import platform
    import sys

    return Check("python", True, f"{platform.python_version()} ({sys.executable})")


def _engine(python: str | None) -> list[Check]:
    from kvtune.engines.vllm.engine import VllmEngine
    from kvtune.errors import EngineError

    try:
        with VllmEngine(python=python) as engine:
            info = engine.describe()
    except EngineError as error:
        return [Check("vllm", False, error.message, error.fix)]
    tested = "" if info.tested else " (a version that kvtune was not tested with)"
    return [
        Check("vllm", True, f"{info.distribution} {info.version}, {info.platform}{tested}"),
        Check("torch", info.torch is not None, info.torch or "not found beside vLLM"),
        _plugin(info),
    ]


def _plugin(info: EngineInfo) -> Check:
    """Without it vLLM ignores what it is asked to do by kvtune's own policies."""
    from kvtune.policies.plugin_levers import plugin_problem

    if (problem := plugin_problem(info)) is not None:
        found, fix = problem
        return Check("plugin", None, f"{found} (its own policies and live changes need it)", fix)
    return Check("plugin", True, f"kvtune {info.plugin}, which vLLM's servers load")


def _device(device: Device) -> list[Check]:
    from kvtune.kernels.device import cpu_flags, gpu_status
    from kvtune.kernels.nvml import look_at_gpus

    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.1f} GiB"
    checks = [Check("device", True, f"{device.count} x {device.name}{memory}")]
    status = gpu_status()
    checks.append(Check("gpu", True if device.kind == "cuda" else None, status))
    checks += [Check(f"gpu {seen.gpu}", True, _gpu_state(seen)) for seen in look_at_gpus()]
    if device.kind == "cpu":
        fast = "avx512f" in cpu_flags()
        checks.append(
            Check(
                "cpu",
                True if fast else None,
                "AVX-512 is there"
                if fast
                else "no AVX-512: prompts take several times as long in bfloat16 as in float32, "
                "and there is no fp8 KV",
                "" if fast else "serve with --dtype float32, or use another machine",
            )
        )
    return checks


def _gpu_state(seen: GpuSample) -> str:
    """What a GPU does now, as far as it tells."""
    told = [
        (seen.memory_used_bytes, "{:.1f} GiB used", 2**30),
        (seen.busy_ratio, "{:.0f}% busy", 0.01),
        (seen.sm_ratio, "{:.0f}% of the SMs at work", 0.01),
        (seen.tensor_ratio, "tensor cores {:.0f}% of the time", 0.01),
        (seen.dram_bandwidth_ratio, "{:.0f}% of the memory bandwidth", 0.01),
        (seen.power_w, "{:.0f} W", 1),
        (seen.sm_clock_mhz, "SMs at {:.0f} MHz", 1),
        (seen.memory_clock_mhz, "memory at {:.0f} MHz", 1),
    ]
    words = [text.format(value / unit) for value, text, unit in told if value is not None]
    return ", ".join([*words, *(f"held back by {why}" for why in seen.slowed_by)])


def _history(url: str | None) -> Check:
    from kvtune.errors import KvtuneError

    try:
        with options.open_history(url) as history:
            return Check("history", True, f"{len(history.studies())} studies in {history.location}")
    except KvtuneError as error:
        return Check("history", False, error.message, error.fix)


def _ceilings(device: Device, url: str | None, measure: bool) -> Check:
    from kvtune.autotune.cli.console import stderr
    from kvtune.errors import KvtuneError
    from kvtune.kernels.ceilings import measure_ceilings

    known: Ceilings | None = None
    try:
        if measure:
            with stderr.status("measuring memory bandwidth and matrix rate"):
                known = measure_ceilings(device)
        with options.open_history(url) as history:
            if known is not None:
                history.save_ceilings(known)
            else:
                known = history.ceilings(device.key)
    except KvtuneError as error:
        found = "not known" if known is None else f"{_ceilings_text(known)}; not kept"
        return Check("ceilings", False if measure else None, f"{found}: {error.message}", error.fix)
    if known is None:
        return Check("ceilings", None, "not measured yet", "kvtune doctor --measure")
    return Check("ceilings", True, _ceilings_text(known))


def _ceilings_text(known: Ceilings) -> str:
    threads = "" if known.threads is None else f" with {known.threads} threads"
    return (
        f"reads {known.read_bytes_per_s / 1e9:.1f} GB/s, copies {known.copy_bytes_per_s / 1e9:.1f} "
        f"GB/s, {known.matrix_flop_per_s / 1e12:.3g} TFLOP/s in {known.matrix_dtype}{threads} "
        f"(measured {known.measured_at[:10]}: {known.method})"
    )


def _model(path: str) -> Check:
    from kvtune.autotune.trial import check_model
    from kvtune.errors import KvtuneError
    from kvtune.policies.checkpoint import weight_bytes
    from kvtune.policies.model_shape import read_model_shape

    try:
        check_model(path)
        shape = read_model_shape(_existing(path))
    except KvtuneError as error:
        return Check("model", False, error.message, error.fix)
    weights = weight_bytes(path)
    if weights is None:
        return Check("model", False, f"{path} holds no weight files", "finish the download")
    per_token = shape.kv_bytes_per_token(shape.dtype_bytes)
    return Check(
        "model",
        True,
        f"{shape.architecture}, {weights / 2**20:.0f} MiB of weights, "
        f"{per_token:,} KV bytes a token",
    )


def _existing(path: str) -> Path:
    from kvtune.errors import NotFound

    found = Path(path).expanduser()
    if not found.exists():
        raise NotFound(f"the model path {path} does not exist", fix="give a checkpoint directory")
    return found


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(doctor)
