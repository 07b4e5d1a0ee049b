"""kvtune's load client beside `vllm bench serve`, on the same running server.

In every round both send the same prompts (fresh each round) with the same lengths and the same
concurrency; they take turns at going first. Printed are the medians over the rounds, their ratio,
and the median of the ratios within rounds. CPU is that of the client process while requests are
in flight, without start-up.

The server has to be started with VLLM_SERVER_DEV_MODE=1 (its prefix cache is emptied between runs)
or with --no-enable-prefix-caching. `vllm bench serve` needs pandas for this dataset.

    python benchmarks/load_client.py --url http://127.0.0.1:8000 --model NAME --tokenizer PATH
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from kvtune.profilers.load.client import ClosedLoop, replay
from kvtune.profilers.load.request import prepare
from kvtune.profilers.load.runtime import run
from kvtune.profilers.scrape import parse_metrics
from kvtune.types import Endpoint, Request

HITS = "vllm:prefix_cache_hits_total"
SYLLABLES = ("ba", "ke", "li", "mo", "nu", "pa", "re", "si", "to", "vu", "wa", "dra", "fle", "gri")


@dataclass
class Result:
    """What one client measured in one round; times in milliseconds."""

    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    client_cpu_ms_per_request: float
    output_tokens: int
    failed: int
    prefix_hits: float = 0.0


def make_prompts(round_number: int, options: argparse.Namespace) -> list[str]:
    """Return prompts that no other round sends; a word is about three tokens."""
    words = random.Random(f"{options.seed}-{round_number}")

    def word() -> str:
        return "".join(words.choices(SYLLABLES, k=3))

    return [" ".join(word() for _ in range(options.prompt_words)) for _ in range(options.requests)]


def percentile_ms(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1000


def result_of(
    ttfts_s: list[float],
    gaps_s: list[list[float]],
    latencies_s: list[float],
    tokens: list[int],
    duration_s: float,
    cpu_s: float,
    options: argparse.Namespace,
) -> Result:
    """Compute the figures of both clients from their raw times in one way."""
    pooled = [gap for gaps in gaps_s for gap in gaps]
    tpot = [
        (latency - ttft) / (count - 1)
        for latency, ttft, count in zip(latencies_s, ttfts_s, tokens, strict=True)
    ]
    return Result(
        output_tokens_per_s=sum(tokens) / duration_s,
        ttft_p50_ms=percentile_ms(ttfts_s, 50),
        ttft_p95_ms=percentile_ms(ttfts_s, 95),
        tpot_mean_ms=fmean(tpot) * 1000,
        itl_p50_ms=percentile_ms(pooled, 50),
        itl_p95_ms=percentile_ms(pooled, 95),
        client_cpu_ms_per_request=cpu_s / options.requests * 1000,
        output_tokens=sum(tokens),
        failed=options.requests - len(ttfts_s),
    )


def run_kvtune(prompts: list[str], options: argparse.Namespace) -> Result:
    requests = [
        prepare(
            Request(prompt=prompt),
            model=options.model,
            index=index,
            fixed_length=True,
            output_tokens=options.output_tokens,
            cache_salt=None,
        )
        for index, prompt in enumerate(prompts)
    ]
    interval_s = options.scrape_interval or None
    load = run(
        replay(
            Endpoint(options.url, options.model),
            requests,
            ClosedLoop(options.concurrency),
            scrape_interval_s=interval_s,
        )
    )
    complete = [(r, r.first_token_s) for r in load.records if r.first_token_s and r.ok]
    return result_of(
        [first_s - record.sent_s for record, first_s in complete],
        [list(record.gaps_s) for record, _ in complete],
        [record.end_s - record.sent_s for record, _ in complete],
        [record.output_tokens for record, _ in complete],
        load.duration_s,
        load.client_cpu_s,
        options,
    )


def run_vllm_bench(prompts: list[str], options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        dataset, cpu = Path(folder, "prompts.jsonl"), Path(folder, "cpu")
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "bench", "serve"]
        command += ["--backend", "openai", "--endpoint", "/v1/completions"]
        command += ["--base-url", options.url, "--model", options.model]
        command += ["--tokenizer", options.tokenizer, "--skip-chat-template", "--disable-shuffle"]
        command += ["--dataset-name", "custom", "--dataset-path", str(dataset)]
        command += ["--num-prompts", str(len(prompts)), "--max-concurrency"]
        command += [str(options.concurrency), "--custom-output-len", str(options.output_tokens)]
        command += ["--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        command += ["--extra-body", json.dumps({"min_tokens": options.output_tokens})]
        command += ["--save-result", "--save-detailed", "--result-dir", folder]
        command += ["--result-filename", "result.json"]
        done = subprocess.run(
            command,
            env=os.environ | {"BENCH_CPU_FILE": str(cpu), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stderr[-3000:]}")
        found = json.loads(Path(folder, "result.json").read_text())
        cpu_s = float(cpu.read_text())
    return result_of(
        found["ttfts"],
        found["itls"],
        [ttft + sum(gaps) for ttft, gaps in zip(found["ttfts"], found["itls"], strict=True)],
        found["output_lens"],
        found["duration"],
        cpu_s,
        options,
    )


def empty_prefix_cache(url: str) -> None:
    """Ask for an empty prefix cache; servers that cannot are caught by the hits they count."""
    try:
        urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"").close()
    except urllib.error.HTTPError:
        return


def prefix_hits(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        return parse_metrics(page.read().decode()).counters.get(HITS, 0.0)


CLIENTS = {"kvtune": run_kvtune, "vllm bench": run_vllm_bench}


def measure(client: str, prompts: list[str], options: argparse.Namespace) -> Result:
    empty_prefix_cache(options.url)
    hits = prefix_hits(options.url)
    result = CLIENTS[client](prompts, options)
    result.prefix_hits = prefix_hits(options.url) - hits
    if result.prefix_hits:
        raise SystemExit(
            f"{client} hit {result.prefix_hits:.0f} tokens in the prefix cache: start the server "
            "with VLLM_SERVER_DEV_MODE=1 or with --no-enable-prefix-caching"
        )
    return result


def print_table(results: dict[str, list[Result]]) -> None:
    """Print medians, their ratio, and the median of the ratios within a round (less drift)."""
    ours, theirs = results["kvtune"], results["vllm bench"]
    title = f"median of {len(ours)} rounds"
    print(f"{title:<28}{'kvtune':>10}{'vllm bench':>12}{'ratio':>8}{'within rounds':>15}")
    for name in Result.__dataclass_fields__:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(ours, theirs, strict=True)]
        our_median, their_median = (median(side) for side in zip(*pairs, strict=True))
        row = f"{name:<28}{our_median:>10.2f}{their_median:>12.2f}"
        if all(b for _, b in pairs):
            row += f"{our_median / their_median:>8.3f}{median(a / b for a, b in pairs):>15.3f}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the name the server answers to")
    parser.add_argument("--tokenizer", required=True, help="path or name, for vllm bench serve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--scrape-interval", type=float, default=1.0, help="0: do not scrape")
    parser.add_argument("--seed", default="kvtune")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {name: [] for name in CLIENTS}
    measure("kvtune", make_prompts(-1, options)[: options.concurrency], options)
    for number in range(options.rounds):
        prompts = make_prompts(number, options)
        order = list(CLIENTS) if number % 2 == 0 else list(reversed(CLIENTS))
        for client in order:
            results[client].append(measure(client, prompts, options))
            latest = results[client][-1]
            print(
                f"round {number}: {client:<10} {latest.output_tokens_per_s:6.1f} tokens/s, load "
                f"average {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
            )
    print_table(results)
    if options.json:
        rows = {client: [asdict(item) for item in items] for client, items in results.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
