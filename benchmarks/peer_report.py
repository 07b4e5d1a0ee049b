"""What came of a comparison of tuners, in tables, with what was lost too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from peer_case import Case, settings_text
from peer_final import choices, key_of, values_of
from peer_log import Log, Part

from kvtune.profilers.goal import goal_met
from kvtune.profilers.statistics import (
    Estimate,
    mean_interval,
    paired_ratio_interval,
)

OURS = "kvtune"


@dataclass(frozen=True, slots=True)
class Duel:
    """kvtune beside a peer. `ratio` is None where a value is 0; `wins` None: not told apart."""

    ratio: Estimate | None
    wins: bool | None
    text: str


def duel(ours: Sequence[float], theirs: Sequence[float]) -> Duel:
    """Compare two choices by what they reached in the same rounds."""
    ratio = paired_ratio_interval(list(zip(ours, theirs, strict=True)))
    if ratio is None:
        return Duel(None, _is_above(ours, theirs), f"{fmean(ours):.3g} against {fmean(theirs):.3g}")
    is_told = ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high
    return Duel(ratio, ratio.estimate > 1 if is_told else None, ratio_text(ratio))


def _is_above(ours: Sequence[float], theirs: Sequence[float]) -> bool | None:
    """Whether one is above the other beyond noise, by the same rounds; None: neither is."""
    _, low, high = mean_interval([one - other for one, other in zip(ours, theirs, strict=True)])
    if low is None or high is None or low <= 0 <= high:
        return None
    return low > 0


def ratio_text(ratio: Estimate) -> str:
    """A ratio with its interval."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.estimate:.2f}x"
    return f"{ratio.estimate:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def markdown(case: Case, log: Log) -> str:
    """Searches, choices on new requests, and duels with their sum."""
    searches = log.all(part="search")
    parts = [
        f"## {case.name}: {case.built}",
        f"Goal: {case.goal}. Server: {settings_text(case.base_arguments)}. "
        f"{log.asked['minutes']:g} minutes a search.",
        _searches(searches),
        _choices(case, log, searches),
        _duels(case, log, searches),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def name_of(search: Part) -> str:
    """Who searched in which round, as tables have it."""
    return f"{search['who']} {search['round'] + 1}"


def _searches(searches: Sequence[Part]) -> str:
    lines = [
        "| search | took, s | servers up, s | launches | of them failed | chose | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in searches:
        up = "" if one["servers_s"] is None else f"{one['servers_s']:.0f}"
        cells = [
            name_of(one),
            f"{one['wall_s']:.0f}",
            up,
            str(one["launches"]),
            str(one["failed_launches"]),
            settings_text(one["arguments"]),
            one["says"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _choices(case: Case, log: Log, searches: Sequence[Part]) -> str:
    goal, metric = case.limits, case.limits.objective_metric
    stock = values_of(log, key_of({}), metric)
    if not stock:
        return ""
    lines = [
        f"| settings | chosen by | {metric} | beside stock | goal met |",
        "|---|---|---|---|---|",
    ]
    for choice in choices([(name_of(one), one["arguments"]) for one in searches]):
        values = values_of(log, choice.key, metric)
        if not values:
            continue
        parts = log.all(part="replay", key=choice.key)
        met = sum(
            part["failure"] is None and all(goal_met(goal, part["figures"]).values())
            for part in parts
        )
        beside = duel(values, stock[: len(values)]).text if choice.arguments else ""
        cells = [
            settings_text(choice.arguments),
            ", ".join(choice.by),
            _mean_text(values),
            beside,
            f"{met} of {len(parts)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _duels(case: Case, log: Log, searches: Sequence[Part]) -> str:
    metric = case.limits.objective_metric
    lines = ["| round | peer | kvtune / peer | |", "|---|---|---|---|"]
    sums = []
    for peer in dict.fromkeys(one["who"] for one in searches if one["who"] != OURS):
        told = []
        for ours in (one for one in searches if one["who"] == OURS):
            theirs = next(
                (o for o in searches if o["who"] == peer and o["round"] == ours["round"]), None
            )
            if theirs is None or not (values := _both(log, ours, theirs, metric)):
                continue
            if key_of(ours["arguments"]) == key_of(theirs["arguments"]):
                found, says = duel(*values), "the same settings"
            else:
                found = duel(*values)
                says = {True: "won", False: "lost", None: "not told apart"}[found.wins]
            told.append((values, says))
            lines.append(f"| {ours['round'] + 1} | {peer} | {found.text} | {says} |")
        if told:
            sums.append(_sum(peer, told))
    return "\n".join(lines) + "\n\n" + "\n".join(sums) if sums else ""


def _sum(peer: str, told: Sequence[tuple[tuple[list[float], list[float]], str]]) -> str:
    """All rounds together. A search is one sample of what its tuner finds."""
    count = {
        says: sum(one == says for _, one in told) for says in dict.fromkeys(s for _, s in told)
    }
    counted = ", ".join(f"{says} {number}" for says, number in count.items())
    means = [(fmean(ours), fmean(theirs)) for (ours, theirs), _ in told]
    ratio = paired_ratio_interval(means)
    beside = (
        f"{fmean(ours for ours, _ in means):.3g} against {fmean(them for _, them in means):.3g}"
        if ratio is None
        else ratio_text(ratio)
    )
    return f"kvtune / {peer}, all rounds together ({len(told)}): {beside}; {counted}."


def _both(
    log: Log, ours: Part, theirs: Part, metric: str
) -> tuple[list[float], list[float]] | None:
    both = [values_of(log, key_of(one["arguments"]), metric) for one in (ours, theirs)]
    rounds = min(map(len, both))
    return (both[0][:rounds], both[1][:rounds]) if rounds else None


def _mean_text(values: Sequence[float]) -> str:
    mean = mean_interval(values)
    if mean.low is None or mean.high is None:
        return f"{mean.estimate:.3g}"
    return f"{mean.estimate:.3g} ({mean.low:.3g} to {mean.high:.3g})"
