"""The same search on real servers with and without what makes its trials cheap, in turns.

    python benchmarks/waste_real.py capacity --model .model/SmolLM2-135M-Instruct \\
        --output waste_real.jsonl --markdown waste_real.md

"fixed" runs every trial to its end on a server of its own until the budget is used up; "adaptive"
is `kvtune search` as it is. Each pair has one seed, and knows nothing of the others. At the end
everything that was chosen is measured in turns with stock, on requests that nobody tuned on: only
where both of a pair chose the same, or what is not told apart, is the time that was saved without a
price.

Finished searches and replays are kept in the output; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from peer_case import Case, Setting, cases, setting_of, settings_text
from peer_final import choices, key_of, measure_choices, values_of
from peer_log import Log, Part, say
from peer_report import duel
from peer_search import end_politely, search

from kvtune.errors import KvtuneError

WAYS = ("fixed", "adaptive")
BUDGET = 15
FIXED = "--no-early-stop --no-reuse --enough 0"


def main() -> None:
    options = _options()
    end_politely()
    setting = setting_of(options.case, options.model, options.engine, _work(options))
    try:
        log = Log(options.output, _asked(options))
        for number in range(options.pairs):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                if log.find(part="search", way=way, pair=number) is None:
                    _search(options, setting, log, way, number)
        searches = log.all(part="search")
        chosen = [(f"{one['way']} {one['pair'] + 1}", one["arguments"]) for one in searches]
        with setting.start() as engine:
            found, logs = choices(chosen), _work(options) / "finals"
            measure_choices(setting, engine, found, log, rounds=options.finals, logs=logs)
    except KvtuneError as error:
        raise SystemExit(f"{error.message}; {error.fix}") from error
    text = markdown(setting.case, log)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


def markdown(case: Case, log: Log) -> str:
    """Each search, then what each pair saved and whether both found the same."""
    searches = log.all(part="search")
    lines = [
        "| pair | search | trials | cut | launches | failed | servers up, s | of it trials, s "
        "| chose |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in searches:
        found = one["details"]
        counts = [found[name] for name in ("tried", "cut", "launches", "failed_launches")]
        cells = [str(one["pair"] + 1), one["way"], *map(str, counts)]
        cells += [f"{one['servers_s']:.0f}", f"{found['tried_s']:.0f}"]
        cells.append(settings_text(one["arguments"]))
        lines.append(f"| {' | '.join(cells)} |")
    told = []
    for number in dict.fromkeys(one["pair"] for one in searches):
        pair = {one["way"]: one for one in searches if one["pair"] == number}
        if set(pair) == set(WAYS):
            told.append(_pair(case, log, pair["fixed"], pair["adaptive"]))
    launches, failed = (
        sum(one[name] for one in searches) for name in ("launches", "failed_launches")
    )
    told.append(f"{failed} of {launches} launches failed.")
    return "\n".join([*lines, "", *told]) + "\n"


def _pair(case: Case, log: Log, fixed: Part, mine: Part) -> str:
    """What one pair saved, and what it cost."""
    whole = 1 - mine["servers_s"] / fixed["servers_s"]
    trials = 1 - mine["details"]["tried_s"] / fixed["details"]["tried_s"]
    text = (
        f"Pair {fixed['pair'] + 1}: adaptive took {whole:.0%} less server time in all, "
        f"{trials:.0%} less for its trials"
    )
    if key_of(fixed["arguments"]) == key_of(mine["arguments"]):
        return f"{text}; both chose the same."
    metric = case.limits.objective_metric
    values: Sequence[list[float]] = [
        values_of(log, key_of(one["arguments"]), metric) for one in (mine, fixed)
    ]
    if not all(values):
        return f"{text}; they chose differently."
    found = duel(*values)
    says = {True: "the better", False: "the worse", None: "no clearly different"}[found.wins]
    return f"{text}; it made {says} choice (adaptive / fixed {found.text})."


def _search(options: argparse.Namespace, setting: Setting, log: Log, way: str, pair: int) -> None:
    say(f"pair {pair + 1} of {options.pairs}: {way}")
    words = ["--budget", str(options.budget), *options.search_options.split()]
    if way == "fixed":
        words += options.fixed_options.split()
    found = search(
        setting,
        _work(options) / f"{way}-{pair}",
        seed=options.seed + pair,
        options=words,
    )
    part = {"part": "search", "way": way, "pair": pair}
    log.add({**part, **asdict(found), "load_average": os.getloadavg()[0]})
    say(f"{way} {pair + 1}: {found.settings} ({found.says}, {found.servers_s:.0f} s of servers)")


def _work(options: argparse.Namespace) -> Path:
    folder: Path = options.output.with_suffix(".work")
    return folder


def _asked(options: argparse.Namespace) -> dict[str, object]:
    """What must be the same when it goes on."""
    names = ("case", "engine", "budget", "seed", "search_options", "fixed_options")
    return {name: getattr(options, name) for name in names}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=sorted(cases()))
    parser.add_argument("--model", required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--budget", type=int, default=BUDGET, help="trials of a search")
    parser.add_argument("--finals", type=int, default=5, help="rounds of what was chosen")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair")
    parser.add_argument("--search-options", default="", help="of both, in one text")
    parser.add_argument("--fixed-options", default=FIXED, help="of the fixed ones, in one text")
    parser.add_argument("--output", type=Path, default=Path("waste_real.jsonl"))
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
