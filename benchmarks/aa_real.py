"""Real searches in which nothing can be gained: how many name a winner all the same?

    python benchmarks/aa_real.py --model .model/SmolLM2-135M-Instruct --output aa_real.jsonl

The load is light and the KV pool holds many times what it needs, so that the levers that are left
free cannot act: keeping part of the pool free at admission, and reserving room for a whole prompt.
All else is fixed. A winner is a false one. Each study is a search of its own that knows nothing of
the others, some eight minutes; a study that confirmed nothing tests nothing, and is told.

Three studies say little by themselves: none of three is also what one gets in a third of cases if
three in ten are false. `aa.py` makes thousands of simulated ones.

Finished studies are kept in the output; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from peer_case import Case, Setting
from peer_log import Log, Part, say
from peer_search import end_politely, search

from kvtune.errors import KvtuneError
from kvtune.profilers.statistics import binomial_interval
from kvtune.profilers.synthetic import SyntheticSpec
from kvtune.types import Outcome

NOTHING_ACTS = Case(
    name="nothing acts",
    built="8 at a time, in a pool that holds ten times as many",
    goal="max goodput",
    base_arguments={
        "dtype": "float32",
        "kv-cache-memory-bytes": 512 << 20,
        "max-model-len": 1024,
        "enforce-eager": True,
        "block-size": 128,
        "kv-cache-dtype": "auto",
        "max-num-seqs": 128,
        "max-num-active-seqs": 128,
        "max-num-batched-tokens": 2048,
        "long-prefill-token-threshold": 0,
        "enable-prefix-caching": True,
        "prefix-caching-hash-algo": "sha256",
    },
    load=SyntheticSpec(requests=32, input_tokens="uniform:32-64", output_tokens="uniform:32-48"),
    concurrency=8,
)
BUDGET = 8
SAMPLER = "--sampler tpe"
"""The search's own model knows that these levers do nothing, and would rightly try none."""


def main() -> None:
    options = _options()
    end_politely()
    setting = Setting(NOTHING_ACTS, options.model, options.engine)
    words = ["--budget", str(options.budget), "--max-harm", "lossless"]
    words += options.search_options.split()
    try:
        log = Log(options.output, {"engine": options.engine, "options": words})
        for number in range(options.studies):
            if log.find(study=number) is None:
                say(f"study {number + 1} of {options.studies}")
                home = options.output.with_suffix(".work") / str(number)
                found = search(setting, home, seed=options.seed + number, options=words)
                log.add({"study": number, **asdict(found), "load_average": os.getloadavg()[0]})
                say(f"study {number + 1}: {found.says}, {found.wall_s:.0f} s")
    except KvtuneError as error:
        raise SystemExit(f"{error.message}; {error.fix}") from error
    print(table(log.parts))


def table(studies: Sequence[Part]) -> str:
    """One row a study, and how many winners were false."""
    lines = [
        "| study | tried | confirming | outcome | gain of the recommended one | took, s |",
        "|---|---|---|---|---|---|",
    ]
    for one in studies:
        found = one["details"]
        gain = found["gain"]
        shown = "" if gain is None else f"{gain['estimate'] - 1:+.1%}"
        if gain is not None and gain["low"] is not None and gain["high"] is not None:
            shown += f" ({gain['low'] - 1:+.1%} to {gain['high'] - 1:+.1%})"
        cells = [
            str(one["study"] + 1),
            str(found["tried"]),
            str(found["confirmed"]),
            found["outcome"],
            shown,
            f"{one['wall_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + verdict(studies)


def verdict(studies: Sequence[Part]) -> str:
    """How many of those that confirmed something named a winner, with the exact interval."""
    told = [one["details"] for one in studies if one["details"]["confirmed"]]
    without = len(studies) - len(told)
    aside = f"; {without} confirmed nothing and test nothing" if without else ""
    if not told:
        return f"No study tested anything{aside}."
    false = sum(found["outcome"] == Outcome.WINNER for found in told)
    _, low, high = binomial_interval(false, len(told))
    return (
        f"{false} of {len(told)} named a winner where nothing can be gained "
        f"(95% interval of the share: {low:.0%} to {high:.0%}){aside}."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--studies", type=int, default=3)
    parser.add_argument("--budget", type=int, default=BUDGET, help="trials of a study")
    parser.add_argument("--seed", type=int, default=0, help="of the first study")
    parser.add_argument("--search-options", default=SAMPLER, help="more options, in one text")
    parser.add_argument("--output", type=Path, default=Path("aa_real.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
