"""kvtune against other tuners, for real: the same server, load, goal and time, in turns.

    python benchmarks/peers.py capacity --model .model/SmolLM2-135M-Instruct \\
        --output peers.jsonl --markdown peers.md --tuner-python tuner/bin/python
    python benchmarks/peers.py try --engine simulated --model simulated --minutes 0.5 --rounds 1 \\
        --peers auto_tune --finals 2 --output try.jsonl

In every round each tuner gets the same time and its own seed, and knows nothing of earlier rounds;
kvtune's time includes its confirmation and its questions about answers, which the others have not.
At the end stock and everything that was chosen are measured in turns, on servers of their own and
requests that nobody tuned on.

Peers: `auto_tune` is the algorithm of vLLM's script (`peer_auto_tune.py`), `vllm_tuner` is
vllm-tuner as it is shipped, `vllm_tuner_ours` is its search with kvtune's load client and goal
(`peer_vllm_tuner.py`).

Finished searches and replays are kept in the output; the same command goes on where it stopped. A
search that was cut is run anew.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from peer_auto_tune import auto_tune
from peer_case import Setting, cases, setting_of
from peer_final import choices, measure_choices
from peer_log import Log, say
from peer_report import OURS, markdown, name_of
from peer_search import Found, end_politely, search
from peer_vllm_tuner import Tuner, vllm_tuner

from kvtune.errors import KvtuneError

PEERS = ("auto_tune", "vllm_tuner", "vllm_tuner_ours")
TRIALS_MOST = 200
"""More than fit into the time, which is to be what ends a search."""


def main() -> None:
    options = _options()
    end_politely()
    setting = setting_of(options.case, options.model, options.engine, _work(options))
    try:
        log = Log(options.output, _asked(options))
        for number in range(options.rounds):
            for who in order(options.peers, number):
                if log.find(part="search", who=who, round=number) is None:
                    say(f"round {number + 1} of {options.rounds}: {who}")
                    found = _searched(options, setting, who, number)
                    part = {"part": "search", "who": who, "round": number}
                    kept = log.add({**part, **asdict(found), "load_average": os.getloadavg()[0]})
                    say(f"{name_of(kept)}: {found.settings} ({found.says}, {found.wall_s:.0f} s)")
        chosen = [(name_of(one), one["arguments"]) for one in log.all(part="search")]
        with setting.start() as engine:
            logs = _work(options) / "finals"
            measure_choices(setting, engine, choices(chosen), log, rounds=options.finals, logs=logs)
    except KvtuneError as error:
        raise SystemExit(f"{error.message}; {error.fix}") from error
    text = markdown(setting.case, log)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


def order(peers: Sequence[str], number: int) -> list[str]:
    """Who searches in which order: every other round runs backwards, as machines drift."""
    everybody = [OURS, *peers]
    return everybody if number % 2 == 0 else everybody[::-1]


def _searched(options: argparse.Namespace, setting: Setting, who: str, number: int) -> Found:
    seed = options.seed + number
    limit_s = options.minutes * 60
    folder = _work(options) / f"{who}-{number}"
    if who == OURS:
        words = ["--budget", str(TRIALS_MOST), "--budget-time", f"{limit_s:g}s"]
        words += options.search_options.split()
        return search(setting, folder, seed=seed, options=words)
    if who == "auto_tune":
        with setting.start() as engine:
            return auto_tune(setting, engine, folder, limit_s=limit_s, seed=seed)
    tuner = Tuner(options.tuner_python, "shipped" if who == "vllm_tuner" else "ours")
    return vllm_tuner(setting, tuner, folder, limit_s=limit_s, seed=seed)


def _work(options: argparse.Namespace) -> Path:
    """Where homes, logs and databases of the searches are."""
    folder: Path = options.output.with_suffix(".work")
    return folder


def _asked(options: argparse.Namespace) -> dict[str, object]:
    """What must be the same when a comparison goes on."""
    names = ("case", "engine", "minutes", "seed", "peers", "search_options")
    return {name: getattr(options, name) for name in names}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=sorted(cases()))
    parser.add_argument("--model", required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tuner-python", type=Path, help="that has vllm-tuner")
    parser.add_argument("--minutes", type=float, default=8.0, help="for each search")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--finals", type=int, default=5, help="rounds of what was chosen")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument(
        "--search-options", default="", help="more options of kvtune search, in one text"
    )
    parser.add_argument("--output", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    uses_tuner = any(peer.startswith("vllm_tuner") for peer in options.peers)
    if uses_tuner and options.engine != "vllm":
        parser.error("vllm-tuner needs --engine vllm; leave it out with --peers auto_tune")
    if uses_tuner and options.tuner_python is None:
        parser.error("vllm-tuner needs --tuner-python; leave it out with --peers auto_tune")
    return options


if __name__ == "__main__":
    main()
