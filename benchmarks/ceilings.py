"""Measured memory bandwidth of this CPU beside independent tools on the same machine.

    apt-get install likwid mbw
    python benchmarks/ceilings.py

likwid-bench (https://github.com/RRZE-HPC/likwid) reads and copies in assembly with its own threads,
each on a CPU of its own; mbw copies with memcpy, one process a CPU, all at once. Tools that are not
installed are left out.

Both sides do the same: passes over as many bytes, in buffers that nobody shares, in huge pages
(numpy asks for them itself, the tools get them through glibc), with the same number of threads on
the same CPUs. A pass is timed alone and the best of about a dozen counts in a round, since what
else runs on the machine only slows passes down. Sides take turns in random order. Bytes that are
read and bytes that are written count; both copies bypass the cache (`copy_mem`, and memcpy of this
size), so that no line is read only to be overwritten.

Few cores reach the memory's limit only if they ask for lines ahead of time. numpy's reduction has a
prefetch instruction in its loop, likwid's read kernels have none. So likwid also runs a kernel of
ours, its own load kernel with prefetches, with likwid's buffers, threads, clock and count of bytes
(needs a compiler). The row "best read kernel" is the fairest: a ceiling is what any kernel reaches.

On a machine that others use, put `nice -n -15` in front, as root (real-time priority stops likwid,
whose threads spin). Given is the ratio kvtune / tool over the rounds with its 95% interval, and
each side's median and best.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from kvtune.kernels.ceilings import buffer_bytes, last_level_cache_bytes, measure_ceilings
from kvtune.kernels.device import cpu_flags, detect_device
from kvtune.profilers.statistics import paired_ratio_interval

Tool = Callable[[], float]
MBW_PASSES = 16
ENVIRONMENT = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BEST_READ = ("read", "likwid-bench, best read kernel")
AHEAD_BYTES = 1024
LOAD_AHEAD = """STREAMS 1
TYPE DOUBLE
FLOPS 0
BYTES 8
DESC Load with AVX-512, each line asked for ahead of time
LOADS 1
STORES 0
INSTR_CONST 16
INSTR_LOOP 11
UOPS 10
LOOP 32
""" + "".join(
    f"prefetcht0 [STR0 + GPR1 * 8 + {AHEAD_BYTES + line}]\n"
    f"vmovapd zmm{number}, [STR0 + GPR1 * 8 + {line}]\n"
    for number, line in enumerate(range(0, 256, 64), start=1)
)


def likwid(kernel: str, cpus: list[int], pass_bytes: int, home: Path | None = None) -> float:
    """Bytes a second of one pass of likwid-bench; read and written bytes both count."""
    buffers = 2 if kernel.startswith("copy") else 1
    size = f"S0:{buffers * pass_bytes // 1000}kB:{len(cpus)}"
    words = ["likwid-bench", "-t", kernel, "-w", size, "-i", "1"]
    environment = ENVIRONMENT if home is None else {**ENVIRONMENT, "HOME": str(home)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return 1e6 * found(r"MByte/s:\s+([\d.]+)", done.stdout)


def mbw(cpus: list[int], pass_bytes: int) -> float:
    """Bytes a second that memcpy reads and writes, one process a CPU at the same time.

    Processes do not start their copies together: only the middle half of the passes of each, when
    all of them copy, is taken.
    """
    mib = str(pass_bytes // len(cpus) // 2**20)
    words = ["mbw", "-q", "-t0", "-n", str(MBW_PASSES), mib]
    runs = [
        subprocess.Popen(
            ["taskset", "-c", str(cpu), *words],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for cpu in cpus
    ]
    total = 0.0
    for run in runs:
        passes = re.findall(r"^\d+\s.*Copy: ([\d.]+) MiB/s", run.communicate()[0], re.MULTILINE)
        total += median(map(float, passes[MBW_PASSES // 4 : -MBW_PASSES // 4]))
    # What mbw calls bandwidth counts a copied byte once.
    return 2 * 2**20 * total


def found(pattern: str, text: str) -> float:
    """The number that a tool printed."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in what the tool printed:\n{text}")
    return float(match[1])


def tools(cpus: list[int], pass_bytes: int, home: Path) -> dict[tuple[str, str], Tool]:
    """What can be compared here, by (kind, tool)."""
    wide = next((f"_{w}" for w in ("avx512", "avx") if {w, f"{w}f"} & cpu_flags()), "_sse")
    there: dict[tuple[str, str], Tool] = {}
    if shutil.which("likwid-bench"):
        for kernel in (f"load{wide}", "clload"):
            there["read", f"likwid-bench {kernel}"] = partial(likwid, kernel, cpus, pass_bytes)
        if wide == "_avx512" and shutil.which("gcc"):
            kernels = home / ".likwid" / "bench" / "x86-64"
            kernels.mkdir(parents=True)
            (kernels / "load_ahead.ptt").write_text(LOAD_AHEAD)
            there["read", "likwid-bench, load_avx512 with prefetches"] = partial(
                likwid, "load_ahead", cpus, pass_bytes, home
            )
        there["copy", f"likwid-bench copy_mem{wide}"] = partial(
            likwid, f"copy_mem{wide}", cpus, pass_bytes
        )
    if shutil.which("mbw"):
        there["copy", "mbw"] = partial(mbw, cpus, pass_bytes)
    return there


def compare(rounds: int, repeats: int, budget_s: float) -> dict[str, Any]:
    """Take turns; returns bytes a second of every round, by kind and by tool."""
    device = detect_device()
    if device.kind != "cpu":
        sys.exit("this compares CPUs: hide the GPU with CUDA_VISIBLE_DEVICES=")
    cpus = sorted(os.sched_getaffinity(0))
    free_bytes = psutil.virtual_memory().available
    pass_bytes = len(cpus) * buffer_bytes(len(cpus), last_level_cache_bytes(), free_bytes)
    rates: dict[str, list[float]] = defaultdict(list)
    load = []
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as home:
        there = tools(cpus, pass_bytes, Path(home))
        if not there:
            sys.exit("there is nothing to compare with: apt-get install likwid mbw")
        for number in range(rounds):
            load.append(os.getloadavg()[0])
            for turn in order.sample([None, *there], len(there) + 1):
                if turn is None:
                    reached = measure_ceilings(device, threads=len(cpus), budget_s=budget_s)
                    rates["read kvtune"].append(reached.read_bytes_per_s)
                    rates["copy kvtune"].append(reached.copy_bytes_per_s)
                else:
                    # One run of mbw makes many passes, and one of likwid a single one.
                    runs = 2 if turn[1] == "mbw" else repeats
                    rates[" ".join(turn)].append(max(there[turn]() for _ in range(runs)))
            print(f"round {number + 1}/{rounds}", file=sys.stderr)
    readers = [" ".join(turn) for turn in there if turn[0] == "read"]
    if readers:
        rates[" ".join(BEST_READ)] = [
            max(each) for each in zip(*(rates[name] for name in readers), strict=True)
        ]
    rows = [
        row(kind, tool, rates[f"{kind} kvtune"], rates[f"{kind} {tool}"])
        for kind, tool in (*there, *([BEST_READ] if readers else []))
    ]
    return {
        "device": device.key,
        "pass_bytes": pass_bytes,
        "load_average": load,
        "rates": rates,
        "rows": rows,
    }


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
    parser.add_argument("--repeats", type=int, default=12, help="passes of likwid-bench in a round")
    parser.add_argument(
        "--budget-s", type=float, default=0.4, help="of kvtune in a round: a dozen passes of each"
    )
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
