"""`kvtune workload`: look at a workload file, or make one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtune.types import Request

app = typer.Typer(
    name="workload",
    help="Look at a workload file, or make one.",
    epilog="Example: kvtune workload inspect requests.jsonl",
    no_args_is_help=True,
)


@app.command(epilog="Example: kvtune workload inspect mooncake_conversation.jsonl")
def inspect(
    file: Annotated[Path, typer.Argument(help="Workload file, also gzipped.")],
    format: Annotated[
        str | None, typer.Option("--format", help="Format [default: recognised].")
    ] = None,
    limit: options.Limit = None,
    html: options.Html = None,
    json: options.Json = False,
) -> None:
    """Print the fingerprint of a workload: lengths, arrivals, and how much prefixes are shared.

    The file is streamed, so its size does not matter.
    """
    from collections import Counter
    from itertools import islice

    from rich.markup import escape

    from kvtune.autotune.cli.console import print_json, stderr, stdout
    from kvtune.autotune.cli.workload_view import print_workload
    from kvtune.autotune.report.page import check_path, write_page
    from kvtune.autotune.report.view import workload_view
    from kvtune.autotune.report.workload_page import workload_page
    from kvtune.profilers.arrivals import ArrivalCounter
    from kvtune.profilers.fingerprint import fingerprint
    from kvtune.profilers.workload import stream_requests

    if html is not None:
        check_path(html)
    skipped: Counter[str] = Counter()
    counter = ArrivalCounter()

    def counted() -> Iterator[Request]:
        for request in islice(stream_requests(file, format, skipped=skipped), limit):
            counter.add(request.arrival_s)
            yield request

    with stderr.status(f"reading {escape(str(file))}"):
        found = fingerprint(counted())
    view = workload_view(file.name.split(".")[0], found, counter.result())
    if html is not None:
        write_page(workload_page(view), html)
        stderr.print(f"wrote {escape(str(html))}", soft_wrap=True)
    if json:
        print_json(found.model_dump_json())
        return
    print_workload(view)
    for reason, count in skipped.items():
        stdout.print(f"[yellow]{count} records skipped:[/yellow] {escape(reason)}")


@app.command(
    epilog="Example: kvtune workload make --requests 200 --shared-prefixes 4 --prefix-tokens 608 "
    "--input-tokens uniform:32-120 --output-tokens uniform:40-80 -o requests.jsonl"
)
def make(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    requests: Annotated[int, typer.Option("--requests", help="How many requests.")] = 200,
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens",
            help="Own prompt tokens a request: 512, uniform:100-800, lognormal:512,0.6 or "
            "choice:128,2048.",
        ),
    ] = "512",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", help="Generated tokens a request, written alike.")
    ] = "128",
    arrival: Annotated[
        str | None,
        typer.Option(
            "--arrival", help="poisson:2.5, gamma:2.5,0.5 or constant:4 [default: no times]."
        ),
    ] = None,
    shared_prefixes: Annotated[
        int, typer.Option("--shared-prefixes", help="How many different shared prefixes.")
    ] = 0,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", help="Length of each, a multiple of 16.")
    ] = 0,
    prefix_skew: Annotated[
        float, typer.Option("--prefix-skew", help="Zipf skew of their popularity; 0 is even.")
    ] = 0.0,
    turns: Annotated[int, typer.Option("--turns", help="Requests a conversation.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same file.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Make a synthetic workload from length distributions, arrivals and prefix sharing."""
    import sys

    from kvtune.errors import BadInput
    from kvtune.profilers.synthetic import SyntheticSpec, make_requests
    from kvtune.profilers.traces.prompts_jsonl import format_line

    if output.exists() and not force:
        raise BadInput(f"{output} exists already", fix="choose another name, or pass --force")
    spec = SyntheticSpec(
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        arrival=arrival,
        shared_prefixes=shared_prefixes,
        prefix_tokens=prefix_tokens,
        prefix_skew=prefix_skew,
        turns=turns,
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w") as file:
            file.writelines(format_line(request) + "\n" for request in make_requests(spec, seed))
    except OSError as error:
        raise BadInput(
            f"{output} cannot be written: {error.strerror}", fix="choose another file"
        ) from error
    sys.stderr.write(f"wrote {requests} requests to {output}\n")
