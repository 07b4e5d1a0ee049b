"""What Quest in kvtune's plugin does to the time between two tokens, beside stock vLLM.

    python benchmarks/quest_latency.py --model .model/SmolLM2-135M-Instruct

Two vLLM engines, alike but for Quest, are held in processes of their own and take their steps in
turns, so that both meet the same machine: one decode step of the one, one of the other, first the
one and then the other first. A step's time is the time between two tokens of each of its requests;
nothing of a server but the engine is in it. Prompts are random tokens, and different in each
request, so that no page is read for two requests at once.

Given are medians, and the ratio Quest : stock with its 95% interval over rounds. Each round starts
all requests anew; its ratio is the median of the ratios of steps that followed each other. The
prompts of a later round are found in the prefix cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from kvtune.profilers.statistics import paired_ratio_interval

WARM_STEPS = 2
"""The first steps of a round that are not counted: they fill caches and buffers."""


class Engine:
    """A vLLM engine in a process of its own, which does what it is told."""

    def __init__(self, options: argparse.Namespace, quest: dict[str, Any] | None) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=serve, args=(theirs, options, quest), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def ask(self, **what: Any) -> Any:
        """Have something done, and wait for what comes of it."""
        self.pipe.send(what)
        return self.pipe.recv()


def serve(pipe: Connection, options: argparse.Namespace, quest: dict[str, Any] | None) -> None:
    """Answer what `Engine` asks: to begin with prompts, or for the seconds of a step."""
    from vllm import LLM, SamplingParams

    from kvtune.engines.vllm.plugin.counters import counters

    longest = max(options.contexts) + options.steps + WARM_STEPS + 2
    pages = -(-longest // options.block_size) + 1
    engine = LLM(
        options.model,
        dtype=options.dtype,
        block_size=options.block_size,
        max_model_len=longest,
        max_num_seqs=options.requests,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=len(options.contexts) * options.requests * pages + 1,
        kv_cache_memory_bytes=1 << 20,  # the number of pages is what counts
        enforce_eager=not options.compile,
        additional_config={"kvtune": {"quest": quest}} if quest else {},
        distributed_executor_backend="uni",
    ).llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=options.steps + WARM_STEPS + 1)
    greedy.ignore_eos = True
    pipe.send(None)
    while True:
        told = pipe.recv()
        if "prompts" in told:
            for number, prompt in enumerate(told["prompts"]):
                engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
            answered: set[str] = set()
            while len(answered) < len(told["prompts"]):
                answered |= {output.request_id for output in engine.step()}
            gc.collect()
            pipe.send(None)
        elif "end" in told:
            engine.abort_request([str(number) for number in range(options.requests)])
            engine.step()
            figures = counters()
            names = ("pages_seen", "pages_read", "summary_bytes")
            pipe.send({name: figures.get(name) for name in names} if quest else {})
        else:
            began = time.perf_counter()
            engine.step()
            pipe.send(time.perf_counter() - began)


def measure(
    engines: dict[str, Engine], context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Rounds of steps in turns, with requests of `context` tokens."""
    source = random.Random(context)
    prompts = [
        [source.randrange(100, 40_000) for _ in range(context)] for _ in range(options.requests)
    ]
    rounds: list[dict[str, list[float]]] = []
    before: dict[str, float] = {}
    figures: dict[str, float] = {}
    for number in range(options.rounds + 1):
        for engine in engines.values():
            engine.ask(prompts=prompts)
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for step in range(WARM_STEPS + options.steps):
            order = list(engines) if (step + number) % 2 else list(engines)[::-1]
            for name in order:
                steps[name].append(engines[name].ask(step=step))
        before = figures
        figures = {key: n for engine in engines.values() for key, n in engine.ask(end=True).items()}
        if number:  # The first is without a prefix cache, and warms up.
            rounds.append({name: found[WARM_STEPS:] for name, found in steps.items()})
    ratio = paired_ratio_interval(
        [
            (median(a / b for a, b in zip(each["quest"], each["stock"], strict=True)), 1.0)
            for each in rounds
        ]
    )
    assert ratio is not None
    seen = figures["pages_seen"] - before["pages_seen"]
    return {
        "context_tokens": context,
        "requests": options.requests,
        **{
            f"{name}_ms": 1e3 * median(step for each in rounds for step in each[name])
            for name in engines
        },
        "ratio": ratio.estimate,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "pages_read_share": (figures["pages_read"] - before["pages_read"]) / seen,
        "summary_bytes": figures["summary_bytes"],
        "steps_s": rounds,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="a checkpoint directory")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 8000])
    parser.add_argument("--requests", type=int, default=2, help="in each step")
    parser.add_argument("--quest", type=json.loads, default={"budget_tokens": 1024})
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="in each round, of each engine")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="without --enforce-eager")
    parser.add_argument("--json", type=Path, help="write all figures, each step's among them")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker

    engines = {"stock": Engine(options, None), "quest": Engine(options, options.quest)}
    how = {
        "quest": options.quest,
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "eager": not options.compile,
        "rounds": options.rounds,
        "steps": options.steps,
        "vllm": vllm.__version__,
        "torch": version("torch"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    print(", ".join(f"{key} {value}" for key, value in how.items()))
    print(f"{'context':>8} {'stock ms':>9} {'Quest ms':>9} {'ratio (95%)':>22} {'pages read':>11}")
    found = []
    for context in options.contexts:
        row = measure(engines, context, options)
        found.append(row)
        low, high = row["ratio_low"], row["ratio_high"]
        interval = "" if low is None else f" ({low:.3f} to {high:.3f})"
        print(
            f"{context:>8,} {row['stock_ms']:>9.2f} {row['quest_ms']:>9.2f} "
            f"{row['ratio']:>6.3f}{interval:>16} {row['pages_read_share']:>11.1%}",
            flush=True,
        )
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}; a time is that of an engine's step, with no server around it")
    if options.json:
        options.json.write_text(json.dumps({**how, "load_average": load, "contexts": found}))


if __name__ == "__main__":
    main()
