"""The price of harm: what each rung of the ladder buys over the best below it, and what it costs.

A gain has an interval where both were confirmed in the same rounds. What answers lose is what the
quality suites found beside the stock defaults' answers; whether it is within the limits is proved
only by a report of the size that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean

from kvtune.autotune.comparing import Finding, Values, contrast_of
from kvtune.autotune.decide import meets_goal, objective_values, rounds_of
from kvtune.autotune.gates import Gates
from kvtune.autotune.ladder import RUNGS, STOCK
from kvtune.autotune.ledger import Entry
from kvtune.autotune.quality import words
from kvtune.autotune.words import percent_change
from kvtune.policies.stack import describe
from kvtune.types import Goal, Harm, Interval, Measurement, Price, QualityReport

ALPHA = 0.025
"""The chance with which each bound of a gain is wrong."""

NOTHING = "nothing: answers are computed as before"
PROVED, UNPROVED, TOO_MUCH, NOT_ASKED = "proved", "not proven", "too much", "not asked"


class Worth(IntEnum):
    """Which trial speaks for a rung: one that may be shipped, before one that may not."""

    MEETS = 0
    UNPROVED = 1
    MISSES = 2
    OUT = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """A measured trial: its objective in the search, and what is known of its answers."""

    number: int
    harm: Harm
    settings: str
    value: float
    worth: Worth
    report: QualityReport | None = None

    @property
    def rung(self) -> str:
        """The rung that its settings are on."""
        return STOCK if self.number == 0 else RUNGS[self.harm]


def offers_of(
    goal: Goal,
    points: Sequence[Entry],
    gates: Gates,
    reports: Mapping[int, QualityReport],
    confirmed: Mapping[int, Measurement],
    rejected: Mapping[int, str],
) -> list[Offer]:
    """The measured trials of a search; `reports` are the last on their answers, by number.

    `rejected` says why trials cannot be recommended, once those that are `confirmed` were.
    """
    found = []
    for entry in points:
        number, values = entry.trial.number, objective_values(goal, entry.measurement)
        if not values:
            continue
        last = confirmed.get(number, entry.measurement)
        worth = Worth.MEETS
        if gates.objection(entry) or (number in confirmed and number in rejected):
            worth = Worth.OUT
        elif not meets_goal(goal, last):
            worth = Worth.MISSES
        elif gates.unproved(entry):
            worth = Worth.UNPROVED
        stack = entry.trial.stack
        found.append(
            Offer(number, stack.harm, describe(stack), fmean(values), worth, reports.get(number))
        )
    return found


def price_list(
    goal: Goal,
    offers: Iterable[Offer],
    confirmed: Mapping[int, Measurement],
    *,
    size: str = "",
    decided: Mapping[int, Interval] | None = None,
) -> tuple[Price, ...]:
    """The best trial of each rung that was measured, stock first, beside the best below it.

    Args:
        goal: what is maximised.
        offers: the measured trials.
        confirmed: by number, the rounds of those that were confirmed.
        size: the size of the report that proves what answers lose; empty: any.
        decided: by number, the gains over stock that the decision was made by.
    """
    values = {number: rounds_of(goal, found) for number, found in confirmed.items()}
    values = {number: found for number, found in values.items() if found}
    by_rung: dict[str, list[Offer]] = {}
    for offer in offers:
        by_rung.setdefault(offer.rung, []).append(offer)
    found: list[Price] = []
    below: Offer | None = None
    for rung in sorted(by_rung):
        best = min(by_rung[rung], key=lambda one: (one.worth, one.number not in values, -one.value))
        gain = None
        if below is not None:
            given = (decided or {}).get(best.number) if below.number == 0 else None
            gain = given or _gain(best, below, values)
        found.append(_price(goal, best, below, gain, size))
        if best.worth is not Worth.OUT and (below is None or best.value > below.value):
            below = best
    return tuple(found)


def cost_texts(price: Price) -> list[str]:
    """What answers lose, in words: nothing, or each figure, and whether that is proved."""
    if not price.proof:
        return [NOTHING] if price.over is not None else []
    told = [
        f"{name} {words.change(cost, cost.unit)} {words.unit_of_change(cost.unit)}".rstrip()
        for name, cost in price.costs.items()
    ]
    return [*told, price.proof]


def buys_text(price: Price) -> str:
    """What the step buys, in words; empty for the first one."""
    if price.over is None:
        return ""
    over = "stock" if price.over == 0 else f"trial {price.over}"
    if price.gain is None:
        return f"no ratio, {over} has 0"
    apart = " (measured apart)" if price.gain.repeats == 1 else ""
    return f"{percent_change(price.gain)}{apart} over {over}"


def _price(goal: Goal, best: Offer, below: Offer | None, gain: Interval | None, size: str) -> Price:
    price = Price(
        rung=best.rung,
        harm=best.harm,
        trial=best.number,
        settings=best.settings,
        value=best.value,
        over=None if below is None else below.number,
        gain=gain,
        costs=_costs(best.report) if best.harm is not Harm.LOSSLESS else {},
        proof=_proof(best, size),
    )
    said = f"{best.rung}, trial {best.number} ({best.settings})"
    if below is not None:
        said += f": {goal.objective} {buys_text(price)}; costs {', '.join(cost_texts(price))}"
    return price.model_copy(update={"says": said})


def _proof(offer: Offer, size: str) -> str:
    if offer.harm is Harm.LOSSLESS:
        return ""
    report = offer.report
    if report is None:
        return NOT_ASKED
    if report.outcome == "fail":
        return TOO_MUCH
    return PROVED if report.outcome == "pass" and report.size == (size or report.size) else UNPROVED


def _costs(report: QualityReport | None) -> dict[str, Interval]:
    """The divergence of answers, the needles lost, and what came closest to its limit, or beyond.

    Figures are called by suite, category and metric.
    """
    if report is None:
        return {}
    wanted = (("fidelity", "kl"), ("needle", "recall"))
    told = [
        each for each in report.figures if (each.suite, each.metric) in wanted and not each.category
    ]
    worst = words.worst(report)
    if worst is not None and worst not in told:
        told.append(worst)
    return {words.name(each): each.change.model_copy(update={"unit": each.unit}) for each in told}


def _gain(best: Offer, below: Offer, values: Values) -> Interval | None:
    if best.number in values and below.number in values:
        found = contrast_of(values, best.number, below.number)
        stock = fmean(one.value for one in values[below.number])
        rounds = min(len(values[best.number]), len(values[below.number]))
        ratio = None if found is None else Finding(rounds, *found, stock, ALPHA).ratio
        if ratio is not None:
            return Interval(
                estimate=ratio.estimate,
                low=ratio.low,
                high=ratio.high,
                unit="ratio",
                repeats=rounds,
                method="ratio over the rounds that both were confirmed in, t interval",
            )
    if below.value <= 0:
        return None
    return Interval(
        estimate=best.value / below.value,
        low=None,
        high=None,
        unit="ratio",
        repeats=1,
        method="ratio of the two trials of the search, measured apart",
    )
