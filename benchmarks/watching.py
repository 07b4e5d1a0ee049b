"""What watching a vLLM server costs it, and how soon and how right a verdict is.

    python benchmarks/watching.py --model .model/SmolLM2-135M-Instruct --output watching.json

What the device reaches is measured and kept in a kvtune home of this benchmark's own, as
`kvtune doctor --measure` does. Then a real server is started and, from another process, kept under
steady closed loops (`watching_loads.py`).

- *Verdicts*: seconds from the start of `kvtune profile --url URL --model PATH` to its end, with all
  other defaults, under three loads whose bottleneck is known; and the verdict. Also in a home that
  knows no ceilings: what counters tell has to be named all the same, and where ceilings are needed
  the command has to abstain and say how to get them.
- *Pairs*: windows with `kvtune profile --url` watching in a process of its own, as a user would,
  and windows without, in random order within a pair. Throughput is what the server counted between
  two readings at the ends of a window. Each window begins when the watcher does watch: importing
  Python modules before and judging afterwards happen once, and are given as CPU seconds. Given is
  the ratio watched / alone with its 95% bootstrap interval.
- *Directly*: CPU seconds of all processes of the idle server over many readings of its metrics,
  less those of the same time without. Divided by the interval between readings this is a share of
  one core. The watcher's CPU seconds are counted in the windows of the pairs.

A share of half a per cent is far below what neighbours do to a shared machine: where the interval
of the pairs is wide, the direct count is the finer figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from watching_loads import LOADS, SERVER, Load, keep_up, load_named

from kvtune.engines.base import RunningServer, ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.profilers.load.runtime import run
from kvtune.profilers.scrape import Scraper, parse_metrics
from kvtune.profilers.statistics import bootstrap_interval
from kvtune.profilers.watch import INTERVAL_S
from kvtune.types import Bottleneck, Endpoint

GENERATED = "vllm:generation_tokens_total"
SETTLE_S = 1.0
VERDICT_MOST_S = 90.0
MEASURE = "kvtune doctor --measure"
KVTUNE = [sys.executable, "-c", "from kvtune.autotune.cli.app import main; main()"]


def command(url: str, duration_s: float | None) -> list[str]:
    words = [*KVTUNE, "profile", "--url", url, "--json"]
    return words if duration_s is None else [*words, "--duration", f"{duration_s}s"]


def kvtune(words: Sequence[str], home: str) -> subprocess.CompletedProcess[str]:
    """What a user gets of a command, whose history lies in `home`."""
    done = subprocess.run(
        words, env={**os.environ, "KVTUNE_HOME": home}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done


def measured_ceilings(home: str) -> str:
    """Measure what this device reaches and keep it in `home`; returns it in words."""
    checks = json.loads(kvtune([*KVTUNE, "doctor", "--measure", "--json"], home).stdout)
    found = next(check for check in checks if check["name"] == "ceilings")
    if not found["ok"]:
        raise RuntimeError(f"the ceilings could not be measured: {found}")
    return str(found["found"])


def verdict_of(load: Load, url: str, model: str, home: str, *, knows: bool) -> dict[str, Any]:
    """The verdict under a load, and whether it came in time and is right."""
    began_s = time.perf_counter()
    done = kvtune([*command(url, None), "--model", model], home)
    seconds = time.perf_counter() - began_s
    profile = json.loads(done.stdout)
    verdict = profile["verdict"]
    says_how = MEASURE in done.stderr and MEASURE in verdict["next_experiment"]
    is_right = verdict["bottleneck"] == load.truth
    if load.needs_ceilings and not knows:
        is_right = verdict["bottleneck"] == Bottleneck.ABSTAIN and says_how
    return {
        "load": load.name,
        "built": load.built,
        "truth": load.truth,
        "ceilings": knows,
        "seconds": seconds,
        "in_time": seconds < VERDICT_MOST_S,
        "is_right": is_right,
        "window_s": profile["window_s"],
        **{
            name: verdict[name]
            for name in ("bottleneck", "confidence", "shares", "summary", "next_experiment")
        },
    }


@contextmanager
def watcher(url: str, home: str, duration_s: float) -> Iterator[psutil.Process]:
    """A watching `kvtune profile`, from when it watches to its end."""
    process = subprocess.Popen(
        command(url, duration_s),
        env={**os.environ, "KVTUNE_HOME": home},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        if not any("watching" in line for line in process.stderr):
            raise RuntimeError("kvtune profile did not come to watch")
        yield psutil.Process(process.pid)
        process.communicate(timeout=60)
        if process.returncode != 0:
            raise RuntimeError(f"kvtune profile ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()


async def window(endpoint: Endpoint, window_s: float) -> float:
    """Tokens a second that the server counts over a window."""
    readings = []
    async with Scraper(endpoint) as scraper:
        for pause_s in (0.0, window_s):
            await asyncio.sleep(pause_s)
            samples = await scraper.read([GENERATED])
            if samples is None:
                raise RuntimeError(scraper.problems[-1])
            readings.append((time.perf_counter(), samples.counters[GENERATED]))
    (from_s, before), (to_s, after) = readings
    return (after - before) / (to_s - from_s)


def cpu_s_of(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def server_cpu_s(server: RunningServer) -> float:
    """CPU seconds of all processes of the server until now."""
    group = os.getpgid(server.endpoint.pid or 0)
    total_s = 0.0
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                total_s += cpu_s_of(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return total_s


def own_cpu_s(who: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


async def read_many(endpoint: Endpoint, count: int) -> tuple[int, int]:
    """Read the metrics over and over as a watcher does; bytes and lines of a page."""
    size = (0, 0)
    async with Scraper(endpoint) as scraper:
        for _ in range(count):
            page = await scraper.fetch()
            if page is None:
                raise RuntimeError(scraper.problems[-1])
            parse_metrics(page, [GENERATED])
            size = (len(page), page.count("\n"))
    return size


def direct(server: RunningServer, readings: int) -> dict[str, Any]:
    """CPU seconds of a reading, on the side of the server and of who reads."""
    server_before_s, own_before_s, began_s = server_cpu_s(server), own_cpu_s(), time.perf_counter()
    page_bytes, page_lines = run(read_many(server.endpoint, readings))
    took_s = time.perf_counter() - began_s
    server_s, own_s = server_cpu_s(server) - server_before_s, own_cpu_s() - own_before_s
    idle_before_s = server_cpu_s(server)
    time.sleep(took_s)
    idle_s = server_cpu_s(server) - idle_before_s
    per_reading_s = max(0.0, server_s - idle_s) / readings
    return {
        "readings": readings,
        "page_bytes": page_bytes,
        "page_lines": page_lines,
        "reading_wall_s": took_s / readings,
        "server_cpu_s_per_reading": per_reading_s,
        "server_idle_share_of_core": idle_s / took_s,
        "reader_cpu_s_per_reading": own_s / readings,
        "interval_s": INTERVAL_S,
        "server_share_of_core": per_reading_s / INTERVAL_S,
    }


def compare(
    server: RunningServer, home: str, pairs: int, window_s: float, seed: int
) -> Iterator[dict[str, Any]]:
    """One pair of windows after another."""
    order = random.Random(seed)
    endpoint = server.endpoint
    for _ in range(pairs):
        found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        turns = order.sample(["watched", "alone"], 2)
        found["first"] = turns[0]
        for turn in turns:
            if turn == "watched":
                before_s = own_cpu_s(resource.RUSAGE_CHILDREN)
                with watcher(endpoint.url, home, window_s + 1.0) as process:
                    from_s = cpu_s_of(process)
                    found[turn] = run(window(endpoint, window_s))
                    found["watcher_cpu_s"] = cpu_s_of(process) - from_s
                found["command_cpu_s"] = own_cpu_s(resource.RUSAGE_CHILDREN) - before_s
            else:
                found[turn] = run(window(endpoint, window_s))
            time.sleep(SETTLE_S)
        yield found


def ratio_of(pairs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Throughput watched / alone: ratio of geometric means, with its bootstrap interval."""
    logs = [math.log(pair["watched"] / pair["alone"]) for pair in pairs]
    found = bootstrap_interval(logs, fmean, seed=0)
    return {
        "ratio": math.exp(found.estimate),
        "low": None if found.low is None else math.exp(found.low),
        "high": None if found.high is None else math.exp(found.high),
        "median_tokens_per_s_alone": median(pair["alone"] for pair in pairs),
    }


@contextmanager
def loading(load: Load, endpoint: Endpoint) -> Iterator[None]:
    """A load from another process, once it is steady.

    Raises:
        RuntimeError: it ended by itself, so that a part of the time was without it.
    """
    words = [sys.executable, __file__, "--load", load.name]
    words += ["--url", endpoint.url, "--model", endpoint.model]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(3 * SETTLE_S)
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the load {load.name} ended by itself")
        finally:
            process.kill()


def verdict_rows(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table."""
    rows = ["| load | truth | ceilings | verdict | confidence | after | right |"]
    rows.append("|---|---|---|---|---|---|---|")
    for seen in verdicts:
        late = "" if seen["in_time"] else f" (over {VERDICT_MOST_S:g} s)"
        rows.append(
            f"| {seen['load']} | {seen['truth']} | {'known' if seen['ceilings'] else 'unknown'} "
            f"| {seen['bottleneck']} | {seen['confidence']} | {seen['seconds']:.1f} s{late} "
            f"| {'yes' if seen['is_right'] else 'NO'} |"
        )
    return [*rows, "", *(f"- {load.name}: {load.built}" for load in LOADS)]


def summary(found: dict[str, Any]) -> str:
    """What was found, as Markdown."""
    lines = [f"This device: {found['ceilings']}", "", *verdict_rows(found["verdicts"]), ""]
    if seen := found.get("direct"):
        lines += [
            f"- a reading costs the server {1e3 * seen['server_cpu_s_per_reading']:.2f} ms of CPU "
            f"({seen['page_lines']} lines): {seen['server_share_of_core']:.2%} of one core at one "
            f"each {seen['interval_s']:g} s",
        ]
    if pairs := found["pairs"]:
        share = fmean(pair["watcher_cpu_s"] for pair in pairs) / found["window_s"]
        once_s = median(pair["command_cpu_s"] - pair["watcher_cpu_s"] for pair in pairs)
        lines.append(
            f"- the watcher takes {share:.2%} of a core, and once {once_s:.1f} s of CPU to start "
            "and to judge"
        )
    if seen := found.get("ratio"):
        bounds = "" if seen["low"] is None else f" ({seen['low']:.4f} to {seen['high']:.4f} at 95%)"
        lines.append(
            f"- throughput watched / alone: {seen['ratio']:.4f}{bounds}, {len(found['pairs'])} "
            f"pairs of {found['window_s']:g} s, {seen['median_tokens_per_s_alone']:.1f} tokens/s "
            "alone"
        )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server and measure; what was found is kept after every step."""
    found: dict[str, Any] = {
        "load_average_before": os.getloadavg(),
        "cpus": os.cpu_count(),
        "window_s": options.window_s,
        "verdicts": [],
        "pairs": [],
    }

    def keep(**more: Any) -> None:
        found.update(more)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1))

    with ExitStack() as stack:
        home, bare = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        keep(ceilings=measured_ceilings(home))
        engine = stack.enter_context(VllmEngine())
        spec = ServerSpec(options.model, served_model_name="m", arguments=SERVER)
        server = stack.enter_context(engine.launch(spec, log_path=Path(home) / "server.log"))
        info, url = engine.describe(), server.endpoint.url
        keep(engine=f"{info.distribution} {info.version}", start_s=server.start_s)
        kvtune(command(url, 1.0), home)  # modules are in the page cache from now on
        keep(direct=direct(server, options.readings))
        for load in LOADS:
            with loading(load, server.endpoint):
                for where, knows in ((bare, False), (home, True)):
                    seen = verdict_of(load, url, options.model, where, knows=knows)
                    found["verdicts"].append(seen)
                    keep()
                    print(verdict_rows([seen])[2], file=sys.stderr)
        stack.enter_context(loading(LOADS[0], server.endpoint))
        for pair in compare(server, home, options.pairs, options.window_s, options.seed):
            found["pairs"].append(pair)
            keep(ratio=ratio_of(found["pairs"]))
            print(f"pair {len(found['pairs'])}/{options.pairs}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a checkpoint directory")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--window-s", type=float, default=9.0)
    parser.add_argument("--readings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the raw figures here")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        keep_up(load_named(options.load), options.url, options.model)
        return
    began_s = time.perf_counter()
    found = measure(options)
    print(summary(found))
    loads = [pair["load_average"] for pair in found["pairs"]] or found["load_average_before"]
    print(
        f"- load average {min(loads):.1f} to {max(loads):.1f}, with the server's own; "
        f"{time.perf_counter() - began_s:.0f} s in all; {found['engine']}"
    )


if __name__ == "__main__":
    main()
