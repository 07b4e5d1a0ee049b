"""What each KV-cache method costs in quality on a real model, in one table.

    python benchmarks/policy_quality.py --model .model/SmolLM2-135M-Instruct

For every stack in `STACKS`: stored bits a number (by formula, at 16-bit full precision, metadata
and windows included), KL divergence to the full cache and top-1 agreement while the model is forced
along a text, and how often a pass key is recalled digit by digit, by its depth and the length.
Every prompt runs through the model once and is compressed by each stack in turn, so all stacks see
the same queries, keys and values. Progress goes to stderr. The JSON file is written after every
prompt; `--show FILE ...` prints the table of files that were measured in parts (`--parts`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from policy_stacks import FULL, STACKS, Entry

from kvtune.engines.reference.calibrate import calibrate
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.recording import Recording, record, replay
from kvtune.engines.reference.sequence import Sequence
from kvtune.policies.calibration import CalibratedMethod
from kvtune.policies.footprint import footprint
from kvtune.policies.method_stack import MethodStack, parse_stack

STORED_BYTES = 2
"""Bytes of a full-precision number in the accounting, whatever the engine computes with."""
CALIBRATION_TEXTS = 6
CALIBRATION_TOKENS = 384


@dataclass(slots=True)
class Scores:
    """What one stack did."""

    bits: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreed: list[float] = field(default_factory=list)
    recalled: dict[str, list[float]] = field(default_factory=dict)


def english(engine: ReferenceEngine) -> list[int]:
    """Token ids of the Python manual: English prose and code that every installation brings."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = engine.tokenizer(text, verbose=False).input_ids
    return ids


def needle_prompts(
    engine: ReferenceEngine, lengths: list[int], depths: list[float], keys: int
) -> Iterator[tuple[int, float, list[int], list[int]]]:
    """Yield (length, depth, prompt, answer): a pass key in the manual, asked for at the end."""
    hay = english(engine)
    rng = random.Random(11)
    for length in lengths:
        for depth in depths:
            for _ in range(keys):
                key = str(rng.randrange(10_000, 100_000))
                needle = engine.tokenizer(f"\n\nThe pass key is {key}. Remember it.\n\n").input_ids
                question = engine.tokenizer("\n\nWhat is the pass key? The pass key is").input_ids
                answer = engine.tokenizer(f" {key}").input_ids
                room = length - len(needle) - len(question)
                start = rng.randrange(len(hay) - room)
                cut = int(room * depth)
                text = hay[start : start + room]
                yield length, depth, text[:cut] + needle + text[cut:] + question, answer


def start(engine: ReferenceEngine, stack: MethodStack, recording: Recording) -> Sequence:
    """A sequence after the recorded prompt, compressed by the stack."""
    sequence = engine.start(stack)
    replay(engine, sequence, recording)
    return sequence


def forced(engine: ReferenceEngine, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), V] while decoding along given tokens, one at a time."""
    return torch.stack([engine.decode([sequence], [[token]])[0][-1] for token in tokens])


def stored_bits(engine: ReferenceEngine, sequence: Sequence) -> float:
    """Bits a number of the cache, against the numbers that the full cache would hold."""
    layers = [replace(layer, element_bytes=STORED_BYTES) for layer in engine.layers]
    decoded = sequence.seen_tokens - sequence.prompt_tokens
    taken = footprint(
        sequence.stack, layers, sequence.prompt_tokens, decoded, sequence.observed()
    ).resident_bytes
    full = footprint(MethodStack(), layers, sequence.prompt_tokens, decoded).resident_bytes
    return 8 * STORED_BYTES * taken / full


def calibrate_all(engine: ReferenceEngine, stacks: list[MethodStack]) -> None:
    """Calibrate what needs it on texts that no measurement uses."""
    ids = english(engine)[-CALIBRATION_TEXTS * CALIBRATION_TOKENS :]
    texts = [
        ids[n * CALIBRATION_TOKENS : (n + 1) * CALIBRATION_TOKENS] for n in range(CALIBRATION_TEXTS)
    ]
    for stack in stacks:
        for method in stack.methods:
            if isinstance(method, CalibratedMethod):
                if method.calibration_key in engine.calibrations:
                    continue
                say(f"calibrating {method}")
                engine.use_calibration(method, calibrate(engine, method, texts))


def measure_fidelity(
    engine: ReferenceEngine,
    stacks: dict[str, MethodStack],
    scores: dict[str, Scores],
    *,
    texts: int,
    context_tokens: int,
    forced_tokens: int,
    save: Callable[[], None],
) -> None:
    """KL and top-1 agreement along texts."""
    ids = english(engine)
    rng = random.Random(5)
    last = len(ids) - CALIBRATION_TEXTS * CALIBRATION_TOKENS - context_tokens - forced_tokens
    for number in range(texts):
        begin = rng.randrange(last)
        prompt = ids[begin : begin + context_tokens]
        more = ids[begin + context_tokens : begin + context_tokens + forced_tokens]
        recording = record(engine, prompt)
        truth = forced(engine, start(engine, MethodStack(), recording), more).log_softmax(-1)
        for name, stack in stacks.items():
            sequence = start(engine, stack, recording)
            found = forced(engine, sequence, more).log_softmax(-1)
            own = scores[name]
            own.kl += (truth.exp() * (truth - found)).sum(-1).tolist()
            own.agreed += (truth.argmax(-1) == found.argmax(-1)).float().tolist()
            own.bits.append(stored_bits(engine, sequence))
        save()
        say(f"text {number + 1} of {texts}")


def measure_recall(
    engine: ReferenceEngine,
    stacks: dict[str, MethodStack],
    scores: dict[str, Scores],
    *,
    lengths: list[int],
    depths: list[float],
    keys: int,
    save: Callable[[], None],
) -> None:
    """Share of the digits of a pass key that come first in the model's answer."""
    prompts = list(needle_prompts(engine, lengths, depths, keys))
    for number, (length, depth, prompt, answer) in enumerate(prompts):
        recording = record(engine, prompt)
        first = int(recording.logits.argmax()) == answer[0]
        for name, stack in stacks.items():
            logits = forced(engine, start(engine, stack, recording), answer[:-1])
            right = [first, *(logits.argmax(-1) == torch.tensor(answer[1:])).tolist()]
            cell = f"{length}@{depth:g}"
            scores[name].recalled.setdefault(cell, []).append(sum(right) / len(right))
        save()
        say(f"pass key {number + 1} of {len(prompts)}")


def row(entry: Entry, scores: Scores) -> dict[str, object]:
    """What was measured of a stack; parts that were not are left out."""
    found: dict[str, object] = {"method": entry.method, "stack": entry.stack}
    if scores.kl:
        found |= {
            "bits_per_number": round(sum(scores.bits) / len(scores.bits), 3),
            "kl_nats": sum(scores.kl) / len(scores.kl),
            "kl_standard_error": float(torch.tensor(scores.kl).std() / len(scores.kl) ** 0.5),
            "top1_agreement": sum(scores.agreed) / len(scores.agreed),
        }
    if scores.recalled:
        every = [value for values in scores.recalled.values() for value in values]
        found |= {
            "recall": sum(every) / len(every),
            "recall_by_length_and_depth": {
                cell: sum(values) / len(values) for cell, values in scores.recalled.items()
            },
        }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | stack | bits a number | KL, nats | top-1 | recall |",
        "|---|---|---|---|---|---|",
    ]
    for found in rows:
        fidelity = "| | |"
        if "kl_nats" in found:
            fidelity = (
                f"| {found['bits_per_number']:.2f} "
                f"| {found['kl_nats']:.4f} ± {found['kl_standard_error']:.4f} "
                f"| {found['top1_agreement']:.3f} "
            )
        recall = f"{found['recall']:.2f}" if "recall" in found else ""
        lines.append(f"| {found['method']} | `{found['stack']}` {fidelity}| {recall} |")
    return "\n".join(lines)


def merged(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of several files, those of one stack as one."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for found in json.loads(file.read_text())["rows"]:
            rows.setdefault(found["stack"], {}).update(found)
    return list(rows.values())


def say(text: str) -> None:
    """Report progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("policy_quality.json"))
    parser.add_argument("--show", type=Path, nargs="+", help="print the table of these files")
    parser.add_argument("--parts", nargs="+", default=["fidelity", "recall"])
    parser.add_argument("--only", default="", help="only stacks whose text contains this")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--context-tokens", type=int, default=1024)
    parser.add_argument("--forced-tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048])
    parser.add_argument("--depths", type=float, nargs="*", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--keys", type=int, default=2, help="pass keys for each length and depth")
    args = parser.parse_args()
    if args.show:
        print(table(merged(args.show)))
        return
    if args.model is None:
        parser.error("--model names a checkpoint's directory")

    entries = [FULL, *(entry for entry in STACKS if args.only in entry.stack)]
    engine = ReferenceEngine.load(args.model)
    stacks = {entry.stack: parse_stack(entry.stack) for entry in entries}
    scores = {entry.stack: Scores() for entry in entries}
    settings = {name: str(value) for name, value in vars(args).items()}

    def save() -> None:
        rows = [row(entry, scores[entry.stack]) for entry in entries]
        args.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))

    calibrate_all(engine, list(stacks.values()))
    if "fidelity" in args.parts:
        measure_fidelity(
            engine,
            stacks,
            scores,
            texts=args.texts,
            context_tokens=args.context_tokens,
            forced_tokens=args.forced_tokens,
            save=save,
        )
    if "recall" in args.parts:
        measure_recall(
            engine,
            stacks,
            scores,
            lengths=args.lengths,
            depths=args.depths,
            keys=args.keys,
            save=save,
        )
    print(table(merged([args.out])))


if __name__ == "__main__":
    main()
