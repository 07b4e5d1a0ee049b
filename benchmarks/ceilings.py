"""Measured memory bandwidth of this CPU beside independent tools on the same machine.

    apt-get install likwid mbw
    python benchmarks/ceilings.py

likwid-bench (https://github.com/RRZE-HPC/likwid) reads and copies in assembly with its own threads;
mbw copies with memcpy, one process a CPU, all at once. Tools that are not installed are left out.
In each round kvtune and every tool take turns, each with several short runs of which the best
counts, since what else runs on the machine only slows them down. On a machine that others use, put
`nice -n -15` in front, as root (real-time priority stops likwid, whose threads spin). Given is the
ratio kvtune / tool over the rounds with its 95% interval, and each side's median and best. The
tools get huge pages, which numpy asks for itself: without, what is measured is the table of pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kvtune.kernels.ceilings import measure_ceilings
from kvtune.kernels.device import cpu_flags, detect_device
from kvtune.profilers.statistics import paired_ratio_interval

BUFFER_MB = 512
PASSES = 16
ENVIRONMENT = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def likwid(kernel: str, cpus: list[int]) -> float:
    """Bytes a second of one short run of likwid-bench; read and written bytes both count."""
    size = f"S0:{BUFFER_MB * len(cpus)}MB:{len(cpus)}"
    words = ["likwid-bench", "-t", kernel, "-w", size, "-i", str(PASSES)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return 1e6 * found(r"MByte/s:\s+([\d.]+)", done.stdout)


def mbw(cpus: list[int]) -> float:
    """Bytes a second that memcpy reads and writes, one process a CPU at the same time."""
    runs = [
        subprocess.Popen(
            [
                "taskset",
                "-c",
                str(cpu),
                "mbw",
                "-q",
                "-t0",
                "-n",
                str(PASSES),
                str(BUFFER_MB // 2),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for cpu in cpus
    ]
    texts = [run.communicate()[0] for run in runs]
    # What mbw calls bandwidth counts a copied byte once.
    return 2 * 2**20 * sum(found(r"AVG.*Copy: ([\d.]+) MiB/s", text) for text in texts)


def found(pattern: str, text: str) -> float:
    """The number that a tool printed."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in what the tool printed:\n{text}")
    return float(match[1])


def tools(cpus: list[int]) -> dict[tuple[str, str], Callable[[], float]]:
    """What can be compared here, by (kind, tool)."""
    wide = next((f"_{w}" for w in ("avx512", "avx") if {w, f"{w}f"} & cpu_flags()), "_sse")
    there: dict[tuple[str, str], Callable[[], float]] = {}
    if shutil.which("likwid-bench"):
        there["read", f"likwid-bench load{wide}"] = lambda: likwid(f"load{wide}", cpus)
        there["copy", f"likwid-bench copy_mem{wide}"] = lambda: likwid(f"copy_mem{wide}", cpus)
    if shutil.which("mbw"):
        there["copy", "mbw"] = lambda: mbw(cpus)
    return there


def compare(rounds: int, repeats: int, budget_s: float) -> dict[str, Any]:
    """Take turns; returns bytes a second of every round, by kind and by tool."""
    device = detect_device()
    if device.kind != "cpu":
        sys.exit("this compares CPUs: hide the GPU with CUDA_VISIBLE_DEVICES=")
    cpus = sorted(os.sched_getaffinity(0))
    there = tools(cpus)
    if not there:
        sys.exit("there is nothing to compare with: apt-get install likwid mbw")
    rates: dict[str, list[float]] = defaultdict(list)
    load = []
    for number in range(rounds):
        load.append(os.getloadavg()[0])
        turns = [None, *there]
        for turn in turns if number % 2 else reversed(turns):
            if turn is None:
                reached = measure_ceilings(device, threads=len(cpus), budget_s=budget_s)
                rates["read kvtune"].append(reached.read_bytes_per_s)
                rates["copy kvtune"].append(reached.copy_bytes_per_s)
            else:
                rates[" ".join(turn)].append(max(there[turn]() for _ in range(repeats)))
        print(f"round {number + 1}/{rounds}", file=sys.stderr)
    rows = [
        row(kind, tool, rates[f"{kind} kvtune"], rates[f"{kind} {tool}"]) for kind, tool in there
    ]
    return {"device": device.key, "load_average": load, "rates": rates, "rows": rows}


def row(kind: str, tool: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """How kvtune compares with a tool."""
    ratio = paired_ratio_interval(list(zip(ours, theirs, strict=True)))
    assert ratio is not None
    return {
        "kind": kind,
        "tool": tool,
        "ratio": ratio.estimate,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "kvtune_median_gb_per_s": median(ours) / 1e9,
        "tool_median_gb_per_s": median(theirs) / 1e9,
        "kvtune_best_gb_per_s": max(ours) / 1e9,
        "tool_best_gb_per_s": max(theirs) / 1e9,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; bandwidths in GB/s, median and best of the rounds."""
    lines = [
        "| kind | tool | kvtune / tool (95%) | kvtune, GB/s (best) | tool, GB/s (best) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['kind']} | {r['tool']} | {r['ratio']:.3f} ({r['ratio_low']:.3f} to "
        f"{r['ratio_high']:.3f}) | {r['kvtune_median_gb_per_s']:.1f} "
        f"({r['kvtune_best_gb_per_s']:.1f}) | {r['tool_median_gb_per_s']:.1f} "
        f"({r['tool_best_gb_per_s']:.1f}) |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="at least 2")
    parser.add_argument("--repeats", type=int, default=8, help="short runs of a tool in a round")
    parser.add_argument("--budget-s", type=float, default=3.0, help="of kvtune in a round")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("an interval needs 2 rounds or more")

    compared = compare(args.rounds, args.repeats, args.budget_s)
    if args.json is not None:
        args.json.write_text(json.dumps(compared, indent=1))
    print(
        f"{compared['device']}; load average {min(compared['load_average']):.1f} to "
        f"{max(compared['load_average']):.1f}"
    )
    print(table(compared["rows"]))


if __name__ == "__main__":
    main()
