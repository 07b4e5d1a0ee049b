"""Peak memory and time of fingerprinting workload files of 1 GiB.

    python benchmarks/trace_memory.py [--size-mib 1024] [--format mooncake]

Writes one file for each format into a temporary directory (it needs the size of one file at a
time), fingerprints it in a process of its own, and prints that process's peak resident memory. The
Mooncake file has conversations that grow turn by turn and a system prompt that most of them share,
with block ids in the tens of millions, so that the blocks must be sampled; its true share of
reused blocks is counted while it is written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TextIO

LIMIT_MIB = 200
BLOCK_TOKENS = 512

MEASURE = """
import json, resource, sys, time
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.workload import stream_requests
start_s = time.perf_counter()
result = fingerprint(stream_requests(sys.argv[1]))
print(json.dumps({
    "seconds": time.perf_counter() - start_s,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "requests": result.requests,
    "sampled": result.sampled,
    "share": result.reusable_prefix_share.get(512),
}))
"""


def write_mooncake(file: TextIO, size_bytes: int) -> float:
    """Write Mooncake lines; returns the true share of prompt tokens that are reused."""
    random = Random(0)
    system = list(range(4))
    next_id = len(system)
    conversations: list[list[int]] = []
    written = time_ms = tokens = reused = 0
    system_seen = False
    while written < size_bytes:
        if len(conversations) < 1000 or random.random() < 0.4:
            history = list(system) if random.random() < 0.7 else []
            known = len(history) if system_seen else 0
            system_seen = system_seen or bool(history)
            conversations.append(history)
            if len(conversations) > 1000:
                conversations.pop(random.randrange(1000))
        else:
            history = random.choice(conversations)
            known = len(history)
        new = random.randint(1, 24)
        history += range(next_id, next_id + new)
        next_id += new
        # The last block of a prompt is full here, so that the true share is easy to count.
        tokens += len(history)
        reused += known
        time_ms += int(random.expovariate(1 / 20))
        written += file.write(
            json.dumps(
                {
                    "timestamp": time_ms,
                    "input_length": len(history) * BLOCK_TOKENS,
                    "output_length": random.randint(1, 1000),
                    "hash_ids": history,
                }
            )
            + "\n"
        )
    return reused / tokens


def write_prompts(file: TextIO, size_bytes: int) -> None:
    """Write prompts JSON Lines of some kilobytes of text each."""
    random = Random(0)
    words = _words(random)
    written = 0
    while written < size_bytes:
        prompt = " ".join(random.choices(words, k=random.randint(10, 2000)))
        line = json.dumps({"prompt": prompt, "output_tokens": random.randint(1, 500)})
        written += file.write(line + "\n")


def write_sharegpt(file: TextIO, size_bytes: int) -> None:
    """Write one JSON list of conversations, on one line."""
    random = Random(0)
    words = _words(random)
    written = file.write("[")
    while written < size_bytes:
        turns = [
            {
                "from": ("human", "gpt")[turn % 2],
                "value": " ".join(random.choices(words, k=random.randint(5, 400))),
            }
            for turn in range(random.randint(2, 8))
        ]
        separator = ", " if written > 1 else ""
        conversation = {"id": str(written), "conversations": turns}
        written += file.write(separator + json.dumps(conversation))
    file.write("]")


WRITERS: dict[str, Callable[[TextIO, int], float | None]] = {
    "mooncake": write_mooncake,
    "prompts_jsonl": write_prompts,
    "sharegpt": write_sharegpt,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--format", choices=WRITERS, action="append")
    arguments = parser.parse_args()
    print(f"{'format':14} {'MiB':>5} {'requests':>9} {'peak MiB':>9} {'seconds':>8}  reuse at 512")
    within = True
    for name in arguments.format or WRITERS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace")
            with path.open("w") as file:
                true_share = WRITERS[name](file, arguments.size_mib << 20)
            result = measure(path)
        within = within and result["peak_mib"] < LIMIT_MIB
        reuse = ""
        if true_share is not None:
            kind = "sampled" if result["sampled"] else "exact"
            reuse = f"{result['share']:.4f} ({kind}), true {true_share:.4f}"
        print(
            f"{name:14} {arguments.size_mib:5} {result['requests']:9} {result['peak_mib']:9.0f} "
            f"{result['seconds']:8.1f}  {reuse}",
            flush=True,
        )
    print(f"peak memory {'stays under' if within else 'EXCEEDS'} {LIMIT_MIB} MiB")
    return 0 if within else 1


def measure(path: Path) -> dict[str, float]:
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True
    ).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


def _words(random: Random) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyzäé"
    return ["".join(random.choices(letters, k=random.randint(2, 10))) for _ in range(5000)]


if __name__ == "__main__":
    sys.exit(main())
