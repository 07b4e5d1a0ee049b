"""Does a server whose policies take nothing away answer as stock vLLM does, token for token?

    python benchmarks/plugin_equality.py --model .model/SmolLM2-135M-Instruct

Each server gets the same prompts of 20 to 6,000 tokens, several at a time and so in mixed batches,
with prefix caching and in chunks of 512 tokens. What shares a step with what is up to the moment,
and rounding is up to that, so stock is asked twice, on servers of its own. What a policy answers
like neither is asked again alone, of it and of stock: then nothing but the policy can differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from plugin_servers import ask, ask_all, some_prompts, start
from pydantic import JsonValue
from verdict_models import cut_model

from kvtune.engines.base import RunningServer
from kvtune.engines.vllm.engine import VllmEngine

ALL = 1_000_000
POLICIES: Mapping[str, Mapping[str, JsonValue]] = {
    "quest": {"quest": {"budget_tokens": ALL, "dense_layers": 0}},
    "streaming_llm": {"streaming_llm": {"window_tokens": ALL}},
    "both": {
        "quest": {"budget_tokens": ALL, "dense_layers": 0},
        "streaming_llm": {"window_tokens": ALL},
    },
    "page_eviction": {"page_eviction": {"budget_tokens": ALL}},
    "tiers": {"tiers": {"host_bytes": 1 << 30}},
}


def main() -> None:
    options = _options()
    prompts = some_prompts(options.prompts, 20, options.longest, options.seed)
    sizes: dict[str, JsonValue] = {
        "max_model_len": options.longest + 200,
        "kv_cache_memory_bytes": options.kv_memory_mib << 20,
        "dtype": options.dtype,
    }
    found: dict[str, object] = {"prompts": [len(prompt) for prompt in prompts], **vars(options)}
    with tempfile.TemporaryDirectory() as folder, VllmEngine() as engine:
        model = options.model.resolve()
        if options.layers:
            model = cut_model(model, options.layers, Path(folder))

        def served(name: str, asked: Mapping[str, JsonValue]) -> RunningServer:
            return start(engine, model, asked, Path(folder) / name, **sizes)

        def run(server: RunningServer) -> list[list[int]]:
            return ask_all(server, prompts, options.tokens, options.at_once)

        with served("stock", {}) as server:
            stock = run(server)
        with served("again", {}) as server:
            again = run(server)
        found["stock twice the same"] = sum(map(list.__eq__, stock, again))
        print(f"stock twice: {found['stock twice the same']} the same", flush=True)
        alone: dict[str, dict[int, list[int]]] = {}
        for name in options.policies:
            with served(name, POLICIES[name]) as server:
                answers = run(server)
                others = [
                    place
                    for place, mine in enumerate(answers)
                    if mine not in (stock[place], again[place])
                ]
                alone[name] = {n: ask(server, prompts[n], options.tokens) for n in others}
            print(f"{name}: {len(others)} of {len(prompts)} as no answer of stock", flush=True)
        with served("alone", {}) as server:
            for name, theirs in alone.items():
                wrong = [
                    n
                    for n, answer in theirs.items()
                    if answer != ask(server, prompts[n], options.tokens)
                ]
                found[name] = {"in a batch": list(theirs), "alone": wrong}
                print(f"{name}: {len(wrong)} of {len(prompts)} answers differ from stock's")
    if options.json:
        options.json.write_text(json.dumps(found, default=str, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="only so many, which is sooner done")
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=list(POLICIES))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=6000, help="prompt, in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kv-memory-mib", type=int, default=800)
    parser.add_argument("--dtype", default="auto", help="float32 on a CPU without AVX-512")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
