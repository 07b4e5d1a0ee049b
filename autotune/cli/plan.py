"""`kvtune plan`: what each policy would take and allow on a device, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from kvtune.policies.devices import DeviceSpec
    from kvtune.policies.method import History
    from kvtune.policies.plan import PlanInput, PlanRow

EPILOG = (
    "Example: kvtune plan --config ./model --device h100 --workload requests.jsonl "
    '--stack "snapkv:budget_tokens=1024 + vllm-fp8"'
)
SHARE = 0.92


def plan(
    config: Annotated[Path, typer.Option("--config", help="Model directory, or its config.json.")],
    device: Annotated[
        str | None, typer.Option("--device", help="Device by name, such as h100, h200 or l40s.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", min=0.1, help="Memory of another device.")
    ] = None,
    bandwidth_gb_s: Annotated[
        float | None,
        typer.Option("--bandwidth-gb-s", min=0.1, help="Memory bandwidth of another device."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="Devices that share the model.")
    ] = 1,
    workload: Annotated[
        Path | None,
        typer.Option("--workload", help="Workload file: its mean lengths make the sequence."),
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", min=1, help="Prompt length, without a workload.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=1, help="Tokens generated after it.")
    ] = None,
    stack: Annotated[
        list[str] | None,
        typer.Option(
            "--stack",
            help='Stack to plan (repeatable), such as "snapkv:budget_tokens=512 + kivi:bits=4" '
            "[default: every method alone].",
            show_default=False,
        ),
    ] = None,
    weight_gib: Annotated[
        float | None,
        typer.Option(
            "--weight-gib",
            min=0.001,
            help="Weights of all devices together, if the "
            "config does not tell (quantised checkpoints, some families).",
        ),
    ] = None,
    memory_share: Annotated[
        float,
        typer.Option(
            "--memory-share",
            min=0.01,
            max=1.0,
            help="Share of the device's memory that the engine may use.",
        ),
    ] = SHARE,
    reserve_gib: Annotated[
        float, typer.Option("--reserve-gib", min=0.0, help="Memory for activations and graphs.")
    ] = 0.0,
    json: options.Json = False,
) -> None:
    """Show bytes a token, what fits and the memory roof of each policy, from config.json alone."""
    from json import dumps

    from kvtune.autotune.cli.console import print_json
    from kvtune.policies.method_stack import MethodStack, parse_stack
    from kvtune.policies.model_cache import read_model_cache
    from kvtune.policies.model_config import load_config
    from kvtune.policies.plan import PlanInput, architecture_advice, default_stacks, row_as_dict
    from kvtune.policies.plan import plan as make_plan

    seen = _sequence(workload, input_tokens, output_tokens)
    spec = _device(device, memory_gib, bandwidth_gb_s)
    read, source = load_config(config)
    given = PlanInput(
        cache=read_model_cache(read, source),
        device=spec,
        seen=seen,
        weight_bytes=_weights(read, weight_gib) // tensor_parallel,
        memory_share=memory_share,
        reserve_bytes=int(reserve_gib * 2**30),
        tensor_parallel=tensor_parallel,
    )
    stacks = [MethodStack(), *map(parse_stack, stack)] if stack else default_stacks()
    rows = make_plan(given, stacks)
    advice = architecture_advice(read)
    if json:
        about = {**_about(given), "architectures": advice}
        print_json(dumps({**about, "rows": [row_as_dict(row) for row in rows]}))
    else:
        _print(given, rows)
        _print_advice(advice)


def _sequence(
    workload: Path | None, input_tokens: int | None, output_tokens: int | None
) -> History:
    from kvtune.errors import BadInput
    from kvtune.policies.method import History

    if workload is not None:
        from kvtune.profilers.fingerprint import fingerprint
        from kvtune.profilers.workload import stream_requests

        found = fingerprint(stream_requests(workload, None))
        inputs, outputs = found.input_tokens, found.output_tokens
        input_tokens = input_tokens or _mean(inputs.mean if inputs else None)
        output_tokens = output_tokens or _mean(outputs.mean if outputs else None)
    if input_tokens is None or output_tokens is None:
        missing = "input" if input_tokens is None else "output"
        raise BadInput(
            f"the {missing} length of a sequence is not known",
            fix=f"give --{missing}-tokens, or a --workload whose requests name token counts",
        )
    return History(input_tokens, output_tokens)


def _mean(value: float | None) -> int | None:
    return None if value is None else max(round(value), 1)


def _device(name: str | None, memory_gib: float | None, bandwidth_gb_s: float | None) -> DeviceSpec:
    from kvtune.errors import BadInput
    from kvtune.policies.devices import DEVICES, GB, DeviceSpec, find_device

    if memory_gib is not None and bandwidth_gb_s is not None:
        label = name or "this device"
        return DeviceSpec(label, int(memory_gib * 2**30), bandwidth_gb_s * GB, 0.0, "given")
    if name is None:
        raise BadInput(
            "no device is named",
            fix="--device with one of: "
            + ", ".join(DEVICES)
            + "; or both --memory-gib and --bandwidth-gb-s",
        )
    return find_device(name)


def _weights(config: Mapping[str, Any], weight_gib: float | None) -> int:
    from kvtune.errors import BadInput
    from kvtune.policies.model_parameters import weight_bytes_of

    if weight_gib is not None:
        return int(weight_gib * 2**30)
    found = weight_bytes_of(config)
    if found is None:
        raise BadInput(
            "the size of this model's weights does not follow from its config",
            fix="give --weight-gib: the sum of the checkpoint's weight files",
        )
    return found


def _about(given: PlanInput) -> dict[str, Any]:
    return {
        "architecture": given.cache.architecture,
        "device": given.device.name,
        "device_source": given.device.source,
        "tensor_parallel": given.tensor_parallel,
        "prompt_tokens": given.seen.at_once,
        "output_tokens": given.seen.appended,
        "weight_bytes_per_device": given.weight_bytes,
        "kv_bytes_per_device": given.kv_bytes,
    }


def _print(given: PlanInput, rows: list[PlanRow]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvtune.autotune.cli.console import stdout

    each = "" if given.tensor_parallel == 1 else f" on each of {given.tensor_parallel} devices"
    stdout.print(
        f"{given.cache.architecture} on {given.device.name} ({given.device.source}){each}: "
        f"{given.weight_bytes / 2**30:.1f} GiB of weights, {given.kv_bytes / 2**30:.1f} GiB left "
        f"for caches",
        soft_wrap=True,
    )
    stdout.print(
        f"A sequence is {given.seen.at_once} prompt and {given.seen.appended} generated tokens; "
        "figures are for its end, on one device.\n",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stack", overflow="fold")
    table.add_column("harm", no_wrap=True)
    for column in ("B/token", "tokens", "seqs", "MiB/step", "roof tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.refused:
            table.add_row(escape(row.stack), row.harm.value, "-", "-", "-", "-", "-")
            continue
        table.add_row(
            escape(row.stack),
            row.harm.value,
            f"{row.bytes_per_token:,.0f}",
            f"{row.tokens:,}",
            f"{row.sequences:,}",
            _mebibytes(row.read_bytes_per_step),
            f"{row.tokens_per_s_roof:,.0f}",
        )
    stdout.print(table)
    for row in rows:
        for text in (row.refused,) if row.refused else row.notes:
            stdout.print(f"[dim]{escape(row.stack)}: {escape(text)}[/dim]", soft_wrap=True)
    stdout.print(
        "\ntokens, seqs: what fits at once. MiB/step: what a decode step reads of one sequence. "
        "The roof is the memory bus alone: a step of all sequences that fit reads the weights "
        "once and each sequence's cache. Activations are not counted unless --reserve-gib names "
        "them.",
        soft_wrap=True,
    )


def _print_advice(advice: dict[str, tuple[str, ...]]) -> None:
    from rich.markup import escape

    from kvtune.autotune.cli.console import stdout

    for title, lines in advice.items():
        stdout.print(f"\nThis model has {escape(title)}:", soft_wrap=True)
        for line in lines:
            stdout.print(f"- {escape(line)}", soft_wrap=True)


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(plan)
