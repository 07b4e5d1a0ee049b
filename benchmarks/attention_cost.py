"""What each KV-cache method costs on this machine: time and peak memory beside the full cache.

    python benchmarks/attention_cost.py --model .model/SmolLM2-135M-Instruct

The prompt runs through the model once; each stack compresses it, then decodes. Decoding is timed in
rounds: one token with the full cache, one with the stack, so that both meet the same machine. Given
are the medians, and the median of the ratios of each round with its quartiles. Peak and resident
bytes are those of the caches' own tensors. The reference engine's kernels are plain PyTorch: times
rank methods here, not on a GPU with fused kernels. First, the full cache of the reference engine is
timed against transformers' own cache and attention in the same way.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from policy_quality import calibrate_all, english, say
from policy_stacks import FULL, STACKS, Entry
from transformers import DynamicCache

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.recording import Recording, record, replay
from kvtune.policies.method_stack import parse_stack

ONE_EACH = {entry.method: entry for entry in STACKS if entry.method != "stacks"}
"""The benchmark of cost needs one strength of each method: its last in the list."""


def timed(action: Any) -> float:
    """Seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratio within each round."""
    found = [one / two for one, two in zip(ours, theirs, strict=True)]
    low, middle, high = quantiles(found, n=4)
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def against_transformers(
    engine: ReferenceEngine, prompt: list[int], rounds: int
) -> dict[str, float]:
    """Decode the same tokens with transformers' DynamicCache and with the reference engine."""
    sequence = engine.start()
    prefill_s = timed(lambda: engine.prefill([sequence], [prompt]))
    cache = DynamicCache()
    ids = torch.tensor([prompt])

    @torch.inference_mode()
    def step(tokens: torch.Tensor) -> None:
        with engine.plain() as model:
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    plain_prefill_s = timed(lambda: step(ids))
    token = torch.tensor([[prompt[0]]])
    ours, theirs = [], []
    for number in range(rounds + 3):
        one = timed(lambda: engine.decode([sequence], [[prompt[0]]]))
        two = timed(lambda: step(token))
        if number >= 3:
            ours.append(one)
            theirs.append(two)
    return {
        "prompt_tokens": len(prompt),
        "reference_prefill_s": prefill_s,
        "transformers_prefill_s": plain_prefill_s,
        "reference_ms_a_token": 1e3 * median(ours),
        "transformers_ms_a_token": 1e3 * median(theirs),
        **ratios(ours, theirs),
    }


def cost(
    engine: ReferenceEngine, entry: Entry, recording: Recording, rounds: int
) -> dict[str, Any]:
    """Compress a recorded prompt, then decode in turns with the full cache."""
    full, own = engine.start(), engine.start(parse_stack(entry.stack))
    replay(engine, full, recording)
    compress_s = timed(lambda: replay(engine, own, recording))
    token = recording.prompt[0]
    ours, theirs = [], []
    for number in range(rounds + 2):
        one = timed(lambda: engine.decode([own], [[token]]))
        two = timed(lambda: engine.decode([full], [[token]]))
        if number >= 2:
            ours.append(one)
            theirs.append(two)
    taken, whole = own.measured(), full.measured()
    return {
        "method": entry.method,
        "stack": entry.stack,
        "prompt_tokens": len(recording.prompt),
        "compress_s": compress_s,
        "ms_a_token": 1e3 * median(ours),
        "full_ms_a_token": 1e3 * median(theirs),
        **ratios(ours, theirs),
        "resident_mib": taken.resident_bytes / 2**20,
        "full_resident_mib": whole.resident_bytes / 2**20,
        "peak_mib": taken.peak_bytes / 2**20,
        "full_peak_mib": whole.peak_bytes / 2**20,
        "read_mib_a_step": taken.read_bytes_per_step / 2**20,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | stack | prompt | ms a token | full | ratio (quartiles) | compress, s "
        "| resident, MiB | peak, MiB | read a step, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['method']} | `{row['stack']}` | {row['prompt_tokens']} "
            f"| {row['ms_a_token']:.1f} | {row['full_ms_a_token']:.1f} "
            f"| {row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) "
            f"| {row['compress_s']:.2f} | {row['resident_mib']:.1f} | {row['peak_mib']:.1f} "
            f"| {row['read_mib_a_step']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("attention_cost.json"))
    parser.add_argument("--only", default="", help="only stacks whose text contains this")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8000])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()

    engine = ReferenceEngine.load(args.model)
    entries = [FULL, *(entry for entry in ONE_EACH.values() if args.only in entry.stack)]
    calibrate_all(engine, [parse_stack(entry.stack) for entry in entries])
    ids = english(engine)
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "full": [], "rows": []}
    for length in args.lengths:
        prompt = ids[:length]
        found["full"].append(against_transformers(engine, prompt, args.rounds))
        say(f"full cache against transformers: {found['full'][-1]}")
        recording = record(engine, prompt)
        for entry in entries:
            found["rows"].append(cost(engine, entry, recording, args.rounds))
            say(f"{length} tokens: {entry.stack}")
    args.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found["full"], indent=1))
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
