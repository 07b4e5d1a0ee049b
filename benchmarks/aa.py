"""How often a confirmation names a winner that is none, and how often it finds one that is there.

Simulated studies go through the product's own confirmation and decision; only servers are replaced,
by a figure with noise. On a flat surface every winner is a false one. The rule that kvtune had
before (three rounds, each finalist's own interval at 95%) decides on the same noise beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from kvtune.autotune.confirm import confirm
from kvtune.autotune.decide import Candidate, decide
from kvtune.autotune.ledger import Entry, Ledger, RequestSet
from kvtune.autotune.reporting import Quiet
from kvtune.profilers.statistics import binomial_interval, paired_ratio_interval
from kvtune.types import (
    Choice,
    Goal,
    Harm,
    Measurement,
    Outcome,
    PolicyStack,
    Status,
    Trial,
)

GOAL = Goal()
NOTHING = RequestSet((), "")
RULE_OF_BEFORE_ROUNDS = 3
MATTERS = 0.02
"""A winner that gains less than this over stock in truth is called false."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is true, and how a measurement misses it.

    `gains` are those of the finalists over the baseline, as shares. `noise` is the standard
    deviation of one measurement's logarithm, `wild` how many times that it is for the last
    finalist, or for the baseline if it `is_stock_wild`. `tails` draws it from Student's t with
    three degrees of freedom. The machine walks by `walk` from one measurement to the next, and one
    in `bad` of them is 40% slow.

    All that is so of the requests served a second. `good` is the share of them that is good, of the
    baseline and of each finalist (all of them, if it is empty), of `requests` each by itself; the
    share scatters from one measurement to the next by `cliff`, a standard deviation of its logit.
    """

    name: str
    gains: tuple[float, ...] = (0.0, 0.0)
    noise: float = 0.05
    wild: float = 1.0
    is_stock_wild: bool = False
    tails: bool = False
    walk: float = 0.0
    bad: int = 0
    good: tuple[float, ...] = ()
    cliff: float = 0.5
    requests: int = 40

    def gain(self, number: int) -> float:
        """What finalist `number` really gains, as a share of the baseline's figure."""
        shares = self.good[number] / self.good[0] if self.good else 1.0
        return (1 + self.gains[number - 1]) * shares - 1


FLAT = (
    *(Scenario(f"noise {noise:.0%}", noise=noise) for noise in (0.03, 0.05, 0.1)),
    Scenario("noise 5%, heavy tails", tails=True),
    Scenario("noise 5%, machine walks 3% a measurement", walk=0.03),
    Scenario("noise 10%, heavy tails, machine walks 3%", noise=0.1, tails=True, walk=0.03),
    Scenario("noise 3%, one in 20 is 40% slow", noise=0.03, bad=20),
    Scenario("noise 3%, of one finalist 9%", noise=0.03, wild=3.0),
    Scenario("noise 3%, of the baseline 9%", noise=0.03, wild=3.0, is_stock_wild=True),
    Scenario("noise 5%, one finalist", gains=(0.0,)),
    Scenario("noise 5%, four finalists", gains=(0.0,) * 4),
    *(Scenario(f"noise 5%, {p:.0%} of 40 are good", good=(p,) * 3) for p in (0.02, 0.1, 0.4, 0.8)),
    Scenario("noise 5%, 10% of 40 are good, each alike", good=(0.1,) * 3, cliff=0.0),
    Scenario("noise 5%, 10% of 16 are good", good=(0.1,) * 3, requests=16),
    Scenario("noise 5%, 10% of 40 are good, four finalists", gains=(0.0,) * 4, good=(0.1,) * 5),
)
PLANTED = (
    *(
        Scenario(f"+{gain:.0%}, noise {noise:.0%}", gains=(gain, 0.0), noise=noise)
        for gain in (0.05, 0.1, 0.2)
        for noise in (0.03, 0.05, 0.1)
    ),
    *(
        Scenario(
            f"twice as many, 98% of 40 good where {p:.0%} were", gains=(1.0, 0.0), good=(p, 0.98, p)
        )
        for p in (0.02, 0.1, 0.2, 0.4, 0.6)
    ),
)


class Simulated:
    """Stands in for a ledger: what is asked of it is measured by a formula."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._random = random.Random(f"{scenario.name}/{seed}")
        self._machine = 0.0
        self.measured = 0

    def sitting(self, stack: PolicyStack, *, parent: int, seed: int) -> str | None:
        """Nothing is known beforehand."""
        return None

    def run(self, stack: PolicyStack, requests: RequestSet, *, parent: int, **_: Any) -> Entry:
        """One measurement of trial `parent`."""
        self.measured += 1
        rate = math.exp(self._truth(parent) + self._error(parent))
        share = self._share(parent)
        measurement = Measurement(
            status=Status.OK,
            metrics={GOAL.objective_metric: (rate * share,), "good_share_ratio": (share,)},
            requests_per_repeat=self._scenario.requests if self._scenario.good else 0,
        )
        return Entry(trial(parent), measurement, reused=False)

    def _share(self, number: int) -> float:
        """The share of the requests of one measurement that are good."""
        case, draw = self._scenario, self._random
        if not case.good:
            return 1.0
        truth = case.good[number]
        logit = math.log(truth / (1 - truth)) + draw.gauss(0, case.cliff)
        chance = 1 / (1 + math.exp(-logit))
        return sum(draw.random() < chance for _ in range(case.requests)) / case.requests

    def _truth(self, number: int) -> float:
        return math.log1p(self._scenario.gains[number - 1]) if number else 0.0

    def _error(self, number: int) -> float:
        case, draw = self._scenario, self._random
        self._machine += draw.gauss(0, case.walk)
        is_wild = number == (0 if case.is_stock_wild else len(case.gains))
        error = draw.gauss(0, 1)
        if case.tails:  # scaled to a standard deviation of 1
            error /= math.sqrt(draw.gammavariate(1.5, 2 / 3)) * math.sqrt(3)
        slow = math.log(0.6) if case.bad and draw.random() < 1 / case.bad else 0.0
        return self._machine + slow + error * case.noise * (case.wild if is_wild else 1)


class Found(NamedTuple):
    """Whom a study names as winner, if anybody, and how many measurements that took."""

    winner: int | None
    measured: int


def study(scenario: Scenario, seed: int, rounds: int) -> Found:
    """One study with the product's confirmation and decision."""
    ledger = Simulated(scenario, seed)
    trials = [trial(number) for number in range(len(scenario.gains) + 1)]
    confirmed = confirm(
        trials, cast(Ledger, ledger), NOTHING, Quiet(), goal=GOAL, rounds=rounds, seed=seed
    )
    stock, *finalists = (Candidate(n, trial(n).stack, one) for n, one in confirmed.items())
    decision = decide(GOAL, stock, finalists, {}, rounds=rounds)
    is_won = decision.outcome is Outcome.WINNER
    return Found(decision.recommended if is_won else None, ledger.measured)


def study_of_before(scenario: Scenario, seed: int) -> Found:
    """One study by the rule that kvtune had: three rounds in turned order, each on its own."""
    ledger = Simulated(scenario, seed)
    numbers = range(len(scenario.gains) + 1)
    values: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(RULE_OF_BEFORE_ROUNDS):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            entry = ledger.run(PolicyStack(), NOTHING, parent=number)
            values[number] += entry.measurement.metrics[GOAL.objective_metric]

    def gain(number: int) -> float:
        """Its ratio to the baseline; none where that is not above 1 beyond noise."""
        ratio = paired_ratio_interval(list(zip(values[number], values[0], strict=True)))
        return ratio.estimate if ratio and ratio.low is not None and ratio.low > 1 else 0.0

    best = max(numbers[1:], key=gain)
    return Found(best if gain(best) else None, ledger.measured)


def trial(number: int) -> Trial:
    """The baseline is number 0; every finalist has a stack of its own, the best one the largest."""
    arguments = {f"lever-{place}": number for place in range(number)}
    choice = Choice(policy="lever", parameters={}, arguments=arguments, harm=Harm.LOSSLESS)
    stack = PolicyStack(choices=(choice,) if number else ())
    return Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)


@dataclass(slots=True)
class Count:
    """What studies of one scenario came to, by one rule."""

    studies: int = 0
    false: int = 0
    found: int = 0
    measured: list[int] = field(default_factory=list)

    def add(self, scenario: Scenario, outcome: Found) -> None:
        """Count one study of `scenario`."""
        self.studies += 1
        self.measured.append(outcome.measured)
        if outcome.winner is None:
            return
        is_true = scenario.gain(outcome.winner) >= MATTERS
        self.found += is_true
        self.false += not is_true

    def figures(self) -> dict[str, Any]:
        """Shares with their exact intervals at 95%, and mean measurements a study."""
        return {
            "studies": self.studies,
            "false": list(binomial_interval(self.false, self.studies)),
            "found": list(binomial_interval(self.found, self.studies)),
            "measurements": fmean(self.measured),
        }


def count(scenario: Scenario, studies: int, rounds: int, first_seed: int) -> Iterator[Count]:
    """The product's rule, then the rule of before, each on the same seeds."""
    ours, before = Count(), Count()
    for seed in range(first_seed, first_seed + studies):
        ours.add(scenario, study(scenario, seed, rounds))
        before.add(scenario, study_of_before(scenario, seed))
    yield from (ours, before)


def table(scenarios: Sequence[Mapping[str, Any]], share: str) -> str:
    """Markdown; `share` is "false" or "found"."""
    lines = [
        f"| truth and noise | {share}, % | measurements | {share} by the rule of before, % "
        "| measurements |",
        "|---|---|---|---|---|",
    ]
    for one in scenarios:
        cells = [one["scenario"]["name"]]
        for rule in ("ours", "before"):
            estimate, low, high = (100 * value for value in one[rule][share])
            cells += [
                f"{estimate:.1f} ({low:.1f} to {high:.1f})",
                f"{one[rule]['measurements']:.1f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a scenario")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of confirmation at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first study")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    began_s = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {"flat": [], "planted": []}
    for kind, scenarios in (("flat", FLAT), ("planted", PLANTED)):
        for scenario in scenarios:
            ours, before = count(scenario, options.studies, options.rounds, options.seed)
            results[kind].append(
                {
                    "scenario": asdict(scenario),
                    "ours": ours.figures(),
                    "before": before.figures(),
                }
            )
        for share in ("false",) if kind == "flat" else ("found", "false"):
            print(table(results[kind], share), end="\n\n")
    took_s = time.monotonic() - began_s
    print(f"{options.studies} studies a row, {took_s:.0f} s, load average {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"rounds": options.rounds, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
