"""How many streams the load client follows on one core, and how much delay it adds.

A fake server (its own process, on another core) sends tokens on a schedule known beforehand to
2,000 streams; the client under test runs on one core. Printed for each interval between tokens:
messages a second, the delay the client adds (token recorded - token sent), the lateness of the
server itself (sent - due), their sum (recorded - due), client CPU and peak memory.

    python benchmarks/client_streams.py
    python benchmarks/client_streams.py --intervals-ms 100 --burst 256 --json out.json
    python benchmarks/client_streams.py --keep-text
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from kvtune.profilers.load.client import ClosedLoop, KeptText, Progress, replay
from kvtune.profilers.load.request import PreparedRequest, prepare
from kvtune.profilers.load.runtime import allow_connections, run
from kvtune.profilers.quality.traffic import KEPT_ANSWERS, KEPT_MESSAGES
from kvtune.types import Endpoint, LoadRun, Request

CONNECT_S = 3.0
TARGET_P99_MS = 5.0
TARGET_MEMORY_MB = 300


@dataclass
class Row:
    """What one interval showed; times in milliseconds."""

    interval_ms: float
    streams: int
    messages: int
    messages_per_s: float
    client_p50_ms: float
    client_p99_ms: float
    client_max_ms: float
    server_p99_ms: float
    total_p99_ms: float
    client_cpu_us_per_message: float
    peak_memory_mb: float
    load_average: float
    failed: int

    @property
    def holds(self) -> bool:
        """Whether the targets are met: delay (server included), memory, no failure."""
        return (
            not self.failed
            and self.total_p99_ms < TARGET_P99_MS
            and self.peak_memory_mb < TARGET_MEMORY_MB
        )


def first_token_times(streams: int, interval_s: float, burst: int) -> list[float]:
    """Return when each stream gets its first token: spread evenly, `burst` of them together."""
    start_s = time.perf_counter() + CONNECT_S
    return [start_s + interval_s * (i // burst * burst) / streams for i in range(streams)]


def make_requests(firsts_s: list[float], interval_s: float, tokens: int) -> list[PreparedRequest]:
    return [
        prepare(
            Request(prompt=f"{first_s!r} {interval_s!r}"),
            model="fake",
            index=index,
            fixed_length=True,
            output_tokens=tokens,
            cache_salt=None,
        )
        for index, first_s in enumerate(firsts_s)
    ]


def replay_timed(
    endpoint: Endpoint,
    requests: list[PreparedRequest],
    start: Callable[..., LoadRun],
    keep_text: KeptText | None,
) -> tuple[LoadRun, float]:
    """Replay, and return also when the run started: records are relative to that."""
    starts_s: list[float] = []

    def note_start(progress: Progress) -> None:
        starts_s.append(time.perf_counter() - progress.elapsed_s)

    result = start(
        replay(
            endpoint,
            requests,
            ClosedLoop(len(requests)),
            scrape_interval_s=None,
            on_progress=note_start,
            keep_text=keep_text,
        )
    )
    return result, min(starts_s)


def sent_times(port: int) -> array[float]:
    """Fetch when the server sent each token."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /sent HTTP/1.1\r\n\r\n")
        with connection.makefile("rb") as reader:
            page = reader.read()
    times: array[float] = array("d")
    times.frombytes(page.partition(b"\r\n\r\n")[2])
    return times


def percentile_ms(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] * 1000


def measure(port: int, interval_ms: float, options: argparse.Namespace) -> Row:
    interval_s = interval_ms / 1000
    tokens = max(2, int(options.seconds / interval_s))
    firsts_s = first_token_times(options.streams, interval_s, options.burst)
    requests = make_requests(firsts_s, interval_s, tokens)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "fake", is_vllm=False)
    every = max(1, options.streams // KEPT_ANSWERS)
    kept = KeptText(range(0, options.streams, every), KEPT_MESSAGES) if options.keep_text else None
    start = asyncio.run if options.asyncio else run
    result, start_s = replay_timed(endpoint, requests, start, kept)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sent_s = sent_times(port)
    client, server, total = [], [], []
    complete = [record for record in result.records if record.ok]
    if len(complete) == options.streams:
        for record, first_s in zip(result.records, firsts_s, strict=True):
            base = record.index * tokens
            arrived = accumulate(record.gaps_s, initial=record.first_token_s or 0.0)
            for k, at_s in enumerate(arrived):
                due_s, out_s = first_s + k * interval_s, sent_s[base + k]
                client.append(start_s + at_s - out_s)
                server.append(out_s - due_s)
                total.append(start_s + at_s - due_s)
    else:
        print(result.warnings, file=sys.stderr)
        client = server = total = [float("nan")]
    emitting_s = interval_s * tokens
    return Row(
        interval_ms=interval_ms,
        streams=options.streams,
        messages=len(client),
        messages_per_s=len(client) / emitting_s,
        client_p50_ms=percentile_ms(client, 50),
        client_p99_ms=percentile_ms(client, 99),
        client_max_ms=percentile_ms(client, 100),
        server_p99_ms=percentile_ms(server, 99),
        total_p99_ms=percentile_ms(total, 99),
        client_cpu_us_per_message=result.client_cpu_s / len(client) * 1e6,
        peak_memory_mb=peak_mb,
        load_average=os.getloadavg()[0],
        failed=options.streams - len(complete),
    )


def print_table(rows: list[Row]) -> None:
    columns = ["interval", "messages/s", "client p50", "client p99", "client max", "server p99"]
    columns += ["total p99", "CPU/message", "memory", "load", "holds"]
    print(" ".join(f"{column:>11}" for column in columns))
    for row in rows:
        cells = [
            f"{row.interval_ms:.0f} ms",
            f"{row.messages_per_s:,.0f}",
            f"{row.client_p50_ms:.2f} ms",
            f"{row.client_p99_ms:.2f} ms",
            f"{row.client_max_ms:.1f} ms",
            f"{row.server_p99_ms:.2f} ms",
            f"{row.total_p99_ms:.2f} ms",
            f"{row.client_cpu_us_per_message:.1f} us",
            f"{row.peak_memory_mb:.0f} MB",
            f"{row.load_average:.1f}",
            "yes" if row.holds else "NO",
        ]
        print(" ".join(f"{cell:>11}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[400, 200, 100])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each stream lasts")
    parser.add_argument("--burst", type=int, default=1, help="streams whose tokens come together")
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("--asyncio", action="store_true", help="do without uvloop")
    parser.add_argument(
        "--keep-text",
        action="store_true",
        help="keep text as the first repeat of a trial does",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.client_core})
    allow_connections(options.streams)
    server = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("stream_server.py")),
            f"--core={options.server_core}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        rows = [measure(port, interval_ms, options) for interval_ms in options.intervals_ms]
    finally:
        server.kill()
        server.wait()
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
