"""Record a surface: measure every configuration of a grid on real vLLM servers, one by one.

    python benchmarks/surface_record.py capacity --model .model/SmolLM2-135M-Instruct --minutes 100
    python benchmarks/surface_record.py bandwidth --model ... --dry-run 10

The order is drawn once. The stock configuration is measured every sixth time, because machines
drift; when all points are measured, the best are measured again. Each measurement is written down
when it is made, and the same command goes on where it stopped. A complete recording is packed. A
dry run measures that many, tells how long all would take, and keeps them in a folder of its own.

Nothing else may run on its cores meanwhile; while they are busy with something else, no measurement
is started. `taskset -c 0` before the command leaves the other cores to others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from surface_file import Line, Recording, append, pack, read_recording
from surface_order import next_one, whole_s
from surface_server import Measured, SurfaceBench, quiet_or_late
from surface_spec import SurfaceSpec, served_model, surfaces

from kvtune.engines.vllm.engine import VllmEngine
from kvtune.errors import KvtuneError

FOLDER = Path(__file__).parent / "surfaces"


@dataclass(frozen=True, slots=True)
class Limits:
    """When a session ends, by the clock or by how many were measured, and what counts as busy."""

    until_s: float
    most: int | None
    busy_cores: float
    wait_s: float


def main() -> None:
    options = _options()
    spec = surfaces()[options.surface]
    try:
        with tempfile.TemporaryDirectory() as made, VllmEngine() as engine:
            model = served_model(spec, options.model.resolve(), Path(made))
            bench = SurfaceBench(spec, engine, model, Path(made))
            if options.dry_run is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = options.keep or Path(folder) / f"{spec.name}.jsonl"
                    _dry(bench, path, _limits(options, options.dry_run))
            else:
                _record(bench, options.folder / f"{spec.name}.jsonl", _limits(options, None))
    except KvtuneError as error:
        raise SystemExit(f"{spec.name}: {error.message}; {error.fix}") from error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("surface", choices=sorted(surfaces()))
    parser.add_argument("--model", type=Path, required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--minutes", type=float, help="end cleanly after so long")
    parser.add_argument("--dry-run", type=int, help="measure so many, and tell the whole time")
    parser.add_argument("--keep", type=Path, help="where a dry run is written; by default nowhere")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--busy-cores", type=float, default=0.25, help="that others may use")
    parser.add_argument("--wait-s", type=float, default=600.0, help="for a machine that is busy")
    return parser.parse_args()


def _limits(options: argparse.Namespace, most: int | None) -> Limits:
    limit_s = float("inf") if options.minutes is None else options.minutes * 60
    return Limits(time.monotonic() + limit_s, most, options.busy_cores, options.wait_s)


def _record(bench: SurfaceBench, path: Path, limits: Limits) -> None:
    spec = bench.spec
    if path.with_suffix(".jsonl.xz").exists():
        raise SystemExit(f"{path.name}.xz is complete; move it away to record it anew")
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_recording(path) if path.exists() else None
    if known is not None:
        bench.resume(known.header)
    lines = list(known.lines) if known else []
    if _session(bench, path, lines, limits):
        print(f"complete: {pack(path).name}, {len(lines)} measurements")
        return
    whole = whole_s(spec, lines)
    left_s = None if whole is None else whole - sum(line.wall_s for line in lines)
    print(f"{len(lines)} measurements, about {_minutes(left_s)} left")


def _dry(bench: SurfaceBench, path: Path, limits: Limits) -> None:
    lines: list[Line] = []
    path.unlink(missing_ok=True)
    _session(bench, path, lines, limits)
    found = Recording(header=bench.header, lines=tuple(lines))
    size = len(pack(path).read_bytes())
    total = len(bench.spec.points())
    print(f"verdict on stock: {found.header.verdict.bottleneck}, {found.header.verdict.summary}")
    print(
        f"all {total} points with references and repeats: {_minutes(whole_s(bench.spec, lines))}, "
        f"{size / len(lines):,.0f} bytes a measurement when packed"
    )


def _minutes(time_s: float | None) -> str:
    return "nobody knows how long" if time_s is None else f"{time_s / 60:.0f} minutes"


def _session(bench: SurfaceBench, path: Path, lines: list[Line], limits: Limits) -> bool:
    """Measure until nothing is left or a limit is reached; whether nothing is left.

    A session begins and ends with the stock configuration.
    """
    session = max((line.session for line in lines), default=-1) + 1
    first = len(lines)
    while (chosen := next_one(bench.spec, lines, session)) is not None:
        done = len(lines) - first
        is_over = _is_over(lines, limits, done)
        if is_over and lines[-1].kind == "reference":
            return False
        if is_over:
            chosen = "reference", bench.spec.stock
        kind, point = chosen
        busy_cores = quiet_or_late(limits.busy_cores, limits.wait_s)
        found = bench.measure(len(lines), kind, point, session, busy_cores)
        if not lines:
            append(path, bench.header)
        append(path, found.line)
        lines.append(found.line)
        _say(bench.spec, found)
        if limits.most is not None and len(lines) >= limits.most:
            return False
    return True


def _is_over(lines: list[Line], limits: Limits, done: int) -> bool:
    """Whether no time is left for one more measurement and the reference after it."""
    if not done:
        return False
    longest_s = max(line.wall_s for line in lines[-6:])
    return time.monotonic() + 2 * longest_s > limits.until_s


def _say(spec: SurfaceSpec, found: Measured) -> None:
    line = found.line
    at = ", ".join(f"{axis.argument} {v}" for axis, v in zip(spec.axes, line.point, strict=True))
    what = found.said if line.failure is None else f"{line.failure.failure}: {line.failure.message}"
    print(
        f"[{time.strftime('%H:%M:%S')}] {line.n} {line.kind} {at}: {what} ({line.wall_s:.1f} s)",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
