"""Does a server with the plugin stay whole under mixed traffic for long?

    python benchmarks/plugin_soak.py --model .model/SmolLM2-135M-Instruct --minutes 30 \\
        --policies '{"streaming_llm": {"window_tokens": 512}}'

Users send short and long prompts, some with a beginning in common, into a pool that is too small
for them, so that requests are preempted; every fifth hangs up in the middle of its answer. Every
minute all users pause. Then the pool must be empty, canary prompts must be answered as they were by
a server that nobody else had used, and the memory of all processes is noted. The server is started
anew at every third of the time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from plugin_servers import VOCABULARY, ask, start
from verdict_models import cut_model

from kvtune.engines.base import RunningServer
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.profilers.scrape import parse_metrics

LIVES = 3
CANARY_TOKENS = 24
USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


@dataclass
class Traffic:
    """Users that ask until they are told to stop, and what became of their requests."""

    server: RunningServer
    longest: int
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run_for(self, time_s: float, users: int) -> None:
        """Keep so many users busy for so long; returns when the last of them has its answer."""
        self.stop.clear()
        threads = [threading.Thread(target=self._user, args=(n,)) for n in range(users)]
        for thread in threads:
            thread.start()
        self.stop.wait(time_s)
        self.stop.set()
        for thread in threads:
            thread.join()

    def _user(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number} {self.outcomes.total()}")
        while not self.stop.is_set():
            shared = random.Random(draw.randrange(3)).choices(VOCABULARY, k=self.longest // 4)
            own = draw.choices(VOCABULARY, k=int(20 * (self.longest / 40) ** draw.random()))
            prompt = (shared if draw.random() < 0.4 else []) + own
            try:
                self.outcomes[self._send(prompt, draw)] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.outcomes["error"] += 1
                self.errors.append(f"{type(error).__name__}: {error}")

    def _send(self, prompt: list[int], draw: random.Random) -> str:
        tokens = draw.randint(8, 96)
        hangs_up_after = draw.randint(1, tokens) if draw.random() < 0.2 else None
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True}
        host, _, port = self.server.endpoint.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=900)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        try:
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(answer.read()[:300].decode())
            seen = 0
            while line := answer.readline():
                seen += line.startswith(b"data: {")
                if hangs_up_after is not None and seen >= hangs_up_after:
                    return "hung up"
            return "answered" if seen >= tokens else "cut short"
        finally:
            connection.close()


def main() -> None:
    options = _options()
    asked = json.loads(options.policies)
    draw = random.Random(options.seed)
    canaries = [draw.choices(VOCABULARY, k=n) for n in (30, 400, options.longest // 2)]
    sizes = {
        "max_model_len": options.longest + 200,
        "kv_cache_memory_bytes": options.kv_memory_mib << 20,
        "dtype": options.dtype,
    }
    rows: list[dict[str, object]] = []
    outcomes: Counter[str] = Counter()
    expected: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder, VllmEngine() as engine:
        model = options.model.resolve()
        if options.layers:
            model = cut_model(model, options.layers, Path(folder))
        for life in range(LIVES):
            log = Path(folder) / f"{life}.log"
            with start(engine, model, asked, log, **sizes) as server:
                fresh = [ask(server, canary, CANARY_TOKENS) for canary in canaries]
                expected = expected or fresh
                until_s = time.monotonic() + options.minutes * 60 / LIVES
                traffic = Traffic(server, options.longest, options.seed + life)
                while time.monotonic() < until_s:
                    traffic.run_for(min(60.0, until_s - time.monotonic()), options.users)
                    row = _look(server, canaries, expected)
                    row |= {"life": life, "answers": traffic.outcomes.total()}
                    rows.append(row)
                    print(row, flush=True)
                outcomes += traffic.outcomes
                if traffic.errors:
                    print("errors:", *traffic.errors[:5], sep="\n  ")
    held = [row for row in rows if row["usage"] or row["wrong canaries"]]
    print(
        f"{dict(outcomes)}; {len(rows)} pauses, {len(held)} of them with a leak or a wrong answer"
    )
    if options.json:
        told = {"asked": asked, "outcomes": outcomes, "pauses": rows}
        options.json.write_text(json.dumps(told, indent=1))
    raise SystemExit(bool(held or outcomes["error"] or outcomes["cut short"]))


def _look(
    server: RunningServer, canaries: list[list[int]], expected: list[list[int]]
) -> dict[str, object]:
    """What an idle server holds, and how it answers the canaries."""
    answers = [ask(server, canary, CANARY_TOKENS) for canary in canaries]
    with urllib.request.urlopen(f"{server.endpoint.url}/metrics", timeout=60) as page:
        seen = parse_metrics(page.read().decode())
    tree = psutil.Process(server.endpoint.pid)
    memory = sum(one.memory_info().rss for one in (tree, *tree.children(recursive=True)))
    return {
        "usage": sum(value for key, value in seen.gauges.items() if USAGE in key),
        "preemptions": sum(value for key, value in seen.counters.items() if PREEMPTIONS in key),
        "wrong canaries": sum(map(list.__ne__, answers, expected)),
        "memory_mib": memory >> 20,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="only so many, which serves more requests")
    parser.add_argument("--policies", default="{}", help="kvtune's section of --additional-config")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--longest", type=int, default=2000, help="prompt, in tokens")
    parser.add_argument("--kv-memory-mib", type=int, default=96)
    parser.add_argument("--dtype", default="auto", help="float32 on a CPU without AVX-512")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
