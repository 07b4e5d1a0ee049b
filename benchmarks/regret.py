"""Replay searches on surfaces and see how close to the best each comes, trial by trial.

    python benchmarks/regret.py --output regret.json --seeds 10 --surfaces benchmarks/surfaces/*.xz
    python benchmarks/regret.py --output regret.json --synthetic
    python benchmarks/regret.py --output regret.json --markdown docs/search.md --html regret.html

A recorded surface is searched under three goals: without limits, under its own, and under tight
ones. What a search recommends after each trial is judged by the truth of the surface, as a share
of the best point that there is; a recommendation that misses a limit is worth nothing. Results are
written after each method on each surface, and what is in the file is not run again.

Constants of the search are not to be changed for what seeds from 100 on show: those, and the
surfaces that are named in `docs/search.md`, are looked at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

# Small matrices: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from regret_noise import begin_s, noise_of
from regret_product import NAME, SAYS, WHOLE, WHOLE_SAYS, replay_product
from regret_report import Replay, Results, html, markdown
from regret_rivals import Method, methods
from surface_bench import Judge, Surface, recorded_surfaces, stock_of
from surface_file import read_recording
from synthetic_surfaces import synthetic_surfaces

TRIALS = 30


def main() -> None:
    options = _options()
    results = Results.read(options.output)
    known = searches()
    says = {name: one.says for name, one in known.items()}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for surface in _surfaces(options):
        judge = Judge(surface)
        for name in options.methods.split(","):
            left = [
                seed for seed in seeds if not results.has(surface.name, name, seed, options.trials)
            ]
            if not left:
                continue
            began_s = time.monotonic()
            found = [known[name].run(surface, judge, seed, options.trials) for seed in left]
            results = results.with_more(found, surface, says)
            results.write(options.output)
            took_s = time.monotonic() - began_s
            _say(f"{surface.name}, {name}: {_short(found)}, {took_s / len(left):.1f} s a seed")
    if options.markdown is not None:
        options.markdown.write_text(markdown(results))
    if options.html is not None:
        html(results, options.html)


class Searching(NamedTuple):
    """A search: what it is, and how it is run on a surface with a seed for so many trials."""

    says: str
    run: Callable[[Surface, Judge, int, int], Replay]


def searches() -> dict[str, Searching]:
    """All that can be replayed, by name: the product's own, its model alone, and its rivals."""
    whole = partial(replay_product, name=WHOLE, enough=0.0)
    found = {NAME: Searching(SAYS, replay_product), WHOLE: Searching(WHOLE_SAYS, whole)}
    for name, method in methods().items():
        found[name] = Searching(method.says, partial(_replay_by, method))
    return found


def _replay_by(
    method: type[Method], surface: Surface, judge: Judge, seed: int, trials: int
) -> Replay:
    return replay(surface, judge, method, seed, trials)


def replay(surface: Surface, judge: Judge, method: type[Method], seed: int, trials: int) -> Replay:
    """One search of so many trials, stock among them, and what its choices were worth."""
    search = method(surface, Random(f"search {seed}"))
    at_s, noise = begin_s(seed), noise_of(surface, seed)
    worth: list[float] = []
    failed: list[int] = []
    walls_s: list[float] = []
    ask_s, stops_at = 0.0, None
    point = stock_of(surface.axes)
    for number in range(trials):
        outcome = surface.measured(point, noise(point), at_s)
        began_s = time.perf_counter()
        search.tell(point, outcome, at_s)
        at_s += outcome.wall_s
        walls_s.append(outcome.wall_s)
        if outcome.failure is not None:
            failed.append(number)
        worth.append(judge.worth[search.recommended()])
        left = trials - number - 1
        if stops_at is None and search.wants_to_stop():
            stops_at = number + 1
        following = search.ask(left) if left else None
        ask_s += time.perf_counter() - began_s
        if following is None:
            break
        point = following
    worth += [worth[-1]] * (trials - len(worth))
    return Replay(
        surface=surface.name,
        method=method.name,
        seed=seed,
        worth=tuple(round(one, 5) for one in worth),
        failed=tuple(failed),
        walls_s=tuple(round(one, 2) for one in walls_s),
        stops_at=stops_at,
        points=len(search.seen),
        ask_s=round(ask_s / len(walls_s), 4),
    )


def _surfaces(options: argparse.Namespace) -> Iterator[Surface]:
    for path in options.surfaces:
        found: Iterable[Surface] = recorded_surfaces(read_recording(path), shrink=not options.raw)
        for surface in found:
            if options.raw:
                surface.name += ", raw values"
            yield surface
    if options.synthetic:
        yield from synthetic_surfaces()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--surfaces", type=Path, nargs="*", default=[], help="recordings")
    parser.add_argument("--synthetic", action="store_true", help="those made of formulas")
    parser.add_argument(
        "--raw", action="store_true", help="points are worth the mean of their measurements"
    )
    parser.add_argument("--methods", default=",".join(searches()))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--output", type=Path, default=Path("regret.json"))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--html", type=Path)
    options = parser.parse_args()
    if unknown := [name for name in options.methods.split(",") if name not in searches()]:
        parser.error(f"no method {unknown[0]}; there are {', '.join(searches())}")
    return options


def _short(found: Sequence[Replay]) -> str:
    at = median(one.worth[:15][-1] for one in found)
    return f"median {at:.1%} of the best in 15 trials"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
