"""Options that several commands share, each spelled and explained once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import JsonValue

    from kvtune.engines.base import Engine
    from kvtune.profilers.measure import LoadPlan
    from kvtune.store.database import Store
    from kvtune.types import Workload

    Arguments = Mapping[str, JsonValue]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Also write it as a page to read in a browser, in one file."),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="KVTUNE_STORE",
        help="History: an SQLite file or a PostgreSQL URL [default: in the user's data folder].",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="KVTUNE_API_KEY",
        help="Key of the server at --url; other users of this machine see what is written here, so "
        "better set the variable.",
        show_default=False,
    ),
]
CaCert = Annotated[
    str | None,
    typer.Option(
        "--ca-cert", help="PEM file of certificates to trust beside this machine's, for https."
    ),
]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        "--metrics-url",
        help="Where the metrics of the server are; the key is sent there only on the same host "
        "[default: /metrics below --url].",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Checkpoint directory or hub id to start a server with; with --url: what it serves.",
    ),
]
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", help="Name that requests use for the model.")
]
WorkloadFile = Annotated[
    str | None,
    typer.Option("--workload", help="Requests to replay: prompts JSONL, ShareGPT, Mooncake, ..."),
]
WorkloadFormat = Annotated[
    str | None,
    typer.Option("--workload-format", help="Format of the workload [default: recognised]."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use the first N requests of the workload.")
]
Goals = Annotated[
    list[str] | None,
    typer.Option(
        "--goal",
        help='A limit such as "p95 ttft <= 800ms" (repeatable), or a whole goal such as '
        '"max goodput where p95 ttft <= 800ms and p95 itl <= 80ms".',
        show_default=False,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        help="Closed loop: keep N requests in flight [default: the workload's arrival times, "
        "else 16].",
        show_default=False,
    ),
]
TimeScale = Annotated[
    float,
    typer.Option("--time-scale", help="Open loop: multiply arrival times; 0.5 doubles the rate."),
]
NaturalStop = Annotated[
    bool,
    typer.Option(
        "--natural-stop",
        help="Let answers end where the model ends them instead of at the workload's length.",
    ),
]
OutputTokens = Annotated[
    int,
    typer.Option("--output-tokens", min=1, help="Output length where the workload names none."),
]
EngineName = Annotated[
    str, typer.Option("--engine", help="vllm, or simulated (a queueing model, for trying kvtune).")
]
EnginePython = Annotated[
    str | None,
    typer.Option("--engine-python", help="Interpreter of the environment that vLLM is in."),
]
EngineCommand = Annotated[
    str | None,
    typer.Option(
        "--engine-command",
        help="Template that starts a server on this machine, whose device is put on record, such "
        'as "docker run --rm --init --gpus all --network host -v /models:/models -v '
        "vllm-cache:/root/.cache/vllm -e VLLM_SERVER_DEV_MODE=1 vllm/vllm-openai:v0.32.0 "
        '{args}".',
    ),
]
EngineArgs = Annotated[
    str,
    typer.Option(
        "--engine-args", help='Arguments of every server, such as "--max-model-len 4096".'
    ),
]
ColdStart = Annotated[
    bool,
    typer.Option(
        "--cold-start", help="Start every server anew instead of forking it from a warm parent."
    ),
]
StartTimeout = Annotated[
    float, typer.Option("--start-timeout", help="Seconds that a server may take to start.")
]
RequestTimeout = Annotated[
    float,
    typer.Option("--request-timeout", min=0.1, help="Seconds that a request may take to complete."),
]
StallTimeout = Annotated[
    float,
    typer.Option(
        "--stall-timeout",
        min=0.1,
        help="Seconds without a byte from the server after which it counts as hung.",
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", help="Memory for the KV cache, such as 64MiB or 8GiB."),
]
NoEarlyStop = Annotated[
    bool,
    typer.Option(
        "--no-early-stop",
        help="Measure every trial to its end, also where it is clearly behind the best so far.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the sampler and of made-up prompts.")]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """A size such as `64MiB`, `8G` or `1048576` in bytes.

    Raises:
        BadInput: it is not a size above 0.
    """
    from kvtune.errors import BadInput

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    factor = {**_UNITS, **_BINARY_UNITS}.get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise BadInput(f"{text!r} is not a size", fix="write it like 64MiB, 8GiB or 1048576")
    return int(float(match[1]) * factor)


def parse_duration(text: str) -> float:
    """A time such as `90s`, `15m` or `1.5h` in seconds.

    Raises:
        BadInput: it is not a time above 0, or has no unit.
    """
    from kvtune.errors import BadInput

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"{text!r} is not a time", fix="write it like 90s, 15m or 1.5h")
    return float(match[1]) * _TIME_UNITS[match[2]]


def make_engine(name: str, *, python: str | None, command: str | None, cold_start: bool) -> Engine:
    """The engine that the options name.

    Raises:
        BadInput: there is no such engine, or the options do not go together.
    """
    from kvtune.errors import BadInput

    if name == "simulated":
        from kvtune.engines.simulated.engine import SimulatedEngine

        return SimulatedEngine()
    if name == "vllm":
        from kvtune.engines.vllm.engine import VllmEngine

        return VllmEngine(
            python=python, command=command, start="cold" if cold_start or command else "warm"
        )
    raise BadInput(f"there is no engine {name!r}", fix="use vllm or simulated")


def base_arguments(engine_args: str, kv_memory: str | None) -> dict[str, JsonValue]:
    """The engine arguments that every trial has.

    Raises:
        BadInput: they cannot be read, hold a secret, or say the KV memory twice.
    """
    from kvtune.engines.vllm.arguments import parse_engine_args
    from kvtune.engines.vllm.secret_names import refuse_secret_arguments
    from kvtune.errors import BadInput

    arguments: dict[str, JsonValue] = dict(parse_engine_args(engine_args))
    refuse_secret_arguments(arguments)
    if kv_memory is not None:
        if "kv-cache-memory-bytes" in arguments:
            raise BadInput(
                "the KV memory is given twice, by --kv-memory and in --engine-args",
                fix="keep one of the two",
            )
        arguments["kv-cache-memory-bytes"] = parse_bytes(kv_memory)
    return arguments


def check_arguments(runner: Engine, arguments: Arguments, model: str) -> None:
    """Let the engine's own parser look at the arguments before anything is started.

    Raises:
        BadInput: it refuses them.
    """
    from kvtune.errors import BadInput

    if problems := runner.check_arguments(arguments, model):
        list_of_all = "; `vllm serve --help=all` lists every option"
        raise BadInput(
            "the engine refuses --engine-args: " + "; ".join(problems),
            fix="correct --engine-args" + (list_of_all if runner.name == "vllm" else ""),
        )


def read_workload(
    path: str,
    *,
    format: str | None,
    limit: int | None,
    heldout_share: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Load a workload file that the user named; records that are left out are said on stderr."""
    import sys
    from collections import Counter

    from kvtune.profilers.workload import load_workload

    skipped: Counter[str] = Counter()
    workload = load_workload(
        path,
        format=format,
        limit=limit,
        heldout_share=heldout_share,
        seed=seed,
        skipped=skipped,
    )
    for reason, count in skipped.items():
        sys.stderr.write(f"warning: {path}: {count} records skipped: {reason}\n")
    return workload


def make_plan(
    workload: Workload,
    *,
    model: str | None,
    concurrency: int | None,
    time_scale: float,
    natural_stop: bool,
    output_tokens: int,
    request_timeout_s: float = 300.0,
    stall_timeout_s: float = 120.0,
) -> LoadPlan:
    """How a workload is replayed: closed loop if asked for or without arrival times.

    Raises:
        BadInput: `time_scale` is given and there are no arrival times to scale.
    """
    from kvtune.errors import BadInput
    from kvtune.policies.checkpoint import vocab_size
    from kvtune.profilers.load.client import ClosedLoop, OpenLoop
    from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE, WARMUP_MOST, LoadPlan

    timed = all(request.arrival_s is not None for request in workload.requests)
    arrivals: OpenLoop | ClosedLoop
    if concurrency is None and timed:
        arrivals = OpenLoop(time_scale=time_scale)
    elif time_scale != 1.0:
        why = "--concurrency keeps a closed loop" if timed else "the workload has no arrival times"
        raise BadInput(
            f"--time-scale multiplies arrival times, and {why}",
            fix="leave out --concurrency" if timed else "set the load with --concurrency",
        )
    else:
        arrivals = ClosedLoop(concurrency or 16)
    known = vocab_size(model) if model is not None else None
    warnings = []
    if known is None and any(item.input_tokens is not None for item in workload.requests):
        warnings.append(
            f"the model's vocabulary is not known: prompts that are only lengths are made of its "
            f"first {UNKNOWN_VOCAB_SIZE:,} token ids"
        )
    return LoadPlan(
        arrivals=arrivals,
        fixed_length=not natural_stop,
        default_output_tokens=output_tokens,
        warmup_most=WARMUP_MOST,
        vocab_size=known or UNKNOWN_VOCAB_SIZE,
        request_timeout_s=request_timeout_s,
        stall_timeout_s=stall_timeout_s,
        warnings=tuple(warnings),
    )


def open_history(url: str | None) -> Store:
    """Open the history that `--store` names."""
    from kvtune.store.database import open_store

    return open_store(url)


def log_directory(history: Store, name: str) -> Path:
    """Where the logs of servers go: beside the history if that is a file.

    Raises:
        StoreError: nothing can be written there.
    """
    from tempfile import TemporaryFile

    from kvtune.errors import StoreError
    from kvtune.store.location import default_directory

    base = history.path.parent if history.path is not None else default_directory()
    directory = base / "logs" / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise StoreError(
            f"the logs of servers cannot be kept in {directory}: {error.strerror}",
            fix="make it writable, or set KVTUNE_HOME to another directory",
        ) from error


def resolved_model(model: str) -> str:
    """A model on this disk by its full path, so that files written elsewhere still find it."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def fresh_salt() -> int:
    """A salt that no earlier replay on the same server has had."""
    import secrets

    return secrets.randbits(28)
