"""How much of a search is wasted: launches that fail, and time for what was decided already.

    python benchmarks/waste.py --surfaces benchmarks/surfaces/*.xz --seeds 20 --output waste.jsonl

Searches are replayed on recorded surfaces five times with the same seed and noise: with trials that
all run to their end on servers of their own until the budget is used up ("fixed"), with hopeless
trials cut ("cuts"), with the search ending when it has found enough ("stops"), with running servers
changed where that is possible ("reuses"), and with all three ("adaptive"), as kvtune does.
Time is that of servers: start, warm-up, load and stop. Where two ways end on the same point, or on
two that are worth the same within 1%, their times are compared; where they do not, that is told.

A surface of which nothing failed to start says nothing of failed launches: its filter has nothing
to do. Finished searches are kept in the output; the same command goes on where it stopped. For real
servers, see `waste_real.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median

# Small matrices: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from peer_log import Log, Part, say
from surface_bench import Judge, RecordedSurface, recorded_surfaces
from surface_file import read_recording
from waste_replay import WAYS, Spent, same_pick, saved, spent

from kvtune.profilers.statistics import binomial_interval, bootstrap_interval

TRIALS = 15


def main() -> None:
    options = _options()
    log = Log(options.output, {"trials": options.trials})
    for surface in _surfaces(options):
        judge = Judge(surface)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for way in WAYS:
                if log.find(surface=surface.name, way=way.name, seed=seed) is None:
                    log.add(asdict(spent(surface, judge, way, seed, options.trials)))
            say(f"{surface.name}, seed {seed}: {_short(log, surface.name, seed)}")
    text = markdown([_read(part) for part in log.parts], options.trials)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


def markdown(found: Sequence[Spent], trials: int) -> str:
    """What each way saves on each surface, and how many launches failed."""
    lines = [
        f"Searches of {trials} trials. Time saved beside fixed-length trials is the median of the "
        "seeds that end on the same pick, with its bootstrap interval.",
        "",
        "| surface | way | same pick | time saved, % | worth of the pick, % | launches "
        "| failed, % | cut, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for surface in dict.fromkeys(one.surface for one in found):
        of_surface = [one for one in found if one.surface == surface]
        fixed = {one.seed: one for one in of_surface if one.way == WAYS[0].name}
        for way in WAYS:
            mine = [one for one in of_surface if one.way == way.name and one.seed in fixed]
            if mine:
                lines.append(_row(surface, way.name, [(fixed[one.seed], one) for one in mine]))
    launches, failed = (
        sum(one.launches for one in found),
        sum(one.failed_launches for one in found),
    )
    if launches:
        share, low, high = (100 * value for value in binomial_interval(failed, launches))
        lines += [
            "",
            f"{failed} of {launches} launches failed: {share:.2f}% ({low:.2f} to {high:.2f}).",
        ]
    return "\n".join(lines) + "\n"


def _row(surface: str, way: str, pairs: Sequence[tuple[Spent, Spent]]) -> str:
    shares = saved(pairs)
    is_baseline = way == WAYS[0].name
    told = "" if is_baseline or not shares else _interval(shares)
    same = sum(same_pick(*pair) for pair in pairs)
    mine = [one for _, one in pairs]
    launches = sum(one.launches for one in mine)
    cells = [
        surface,
        way,
        f"{same} of {len(pairs)}",
        told,
        f"{100 * median(one.worth for one in mine):.1f}",
        f"{fmean(one.launches for one in mine):.1f}",
        f"{100 * sum(one.failed_launches for one in mine) / launches:.1f}",
        f"{100 * sum(one.cut for one in mine) / launches:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(shares: Sequence[float]) -> str:
    found = bootstrap_interval([100 * share for share in shares], median, seed=0)
    if found.low is None or found.high is None:
        return f"{found.estimate:.0f}"
    return f"{found.estimate:.0f} ({found.low:.0f} to {found.high:.0f})"


def _short(log: Log, surface: str, seed: int) -> str:
    """Server time of each way."""
    parts = log.all(surface=surface, seed=seed)
    return ", ".join(f"{part['way']} {part['servers_s']:.0f} s" for part in parts)


def _read(part: Part) -> Spent:
    return Spent(**{**part, "pick": tuple(part["pick"])})


def _surfaces(options: argparse.Namespace) -> Iterator[RecordedSurface]:
    for path in options.surfaces:
        found = recorded_surfaces(read_recording(path))
        yield from found if options.all_goals else found[1:2]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--surfaces", type=Path, nargs="+", required=True, help="recordings")
    parser.add_argument(
        "--all-goals", action="store_true", help="also without limits, and with tight ones"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--output", type=Path, default=Path("waste.jsonl"))
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
