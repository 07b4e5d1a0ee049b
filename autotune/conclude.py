"""From where a search stands to its decision: who may win, why others may not, what is doubtful."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtune.autotune.decide import Candidate, decide, doubts
from kvtune.autotune.missed import miss_text
from kvtune.autotune.prices import offers_of, price_list
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.standing import rejected
from kvtune.autotune.words import boundary_text
from kvtune.types import (
    Decision,
    Harm,
    Measurement,
    Outcome,
    Price,
    Regret,
    Trial,
    Workload,
)


def conclude(
    so_far: SoFar,
    confirmed: Mapping[int, Measurement],
    workload: Workload,
    *,
    concurrency: int | None,
    bound_by: Callable[[int], str],
    regret: Callable[[Trial], Regret | None],
    untried: str = "",
) -> Decision:
    """Decide with what was measured and, by the number of a trial, `confirmed`.

    `concurrency` is how many requests are in flight, where that is fixed; `bound_by` says what
    limited the run of a trial, `regret` how far one may be from the best of the space, and
    `untried` is said where nothing meets the goal. What was not confirmed counts as it was
    measured, without its repeats: those are no rounds in common with others. Who failed in one of
    them is out.
    """
    gates, twins = so_far.gates, so_far.twins
    failed = {one.trial.number: one for one in so_far.distinct if one.measurement.failure}
    points = [
        failed.get(entry.trial.number, entry)
        for entry in so_far.points
        if entry.trial.number not in twins
    ]
    missed = {number: miss_text(so_far.goal, one) for number, one in so_far.missed.items()}
    out = rejected(points, gates, confirmed, missed)
    final = [
        Candidate(number, entry.trial.stack, confirmed.get(number, entry.measurement))
        for entry in points
        if (number := entry.trial.number) == 0 or number not in out
    ]
    stock = final.pop(0) if final and final[0].number == 0 else None
    out |= {
        number: f"runs exactly as trial {twin}, whose repeat it is"
        for number, twin in twins.items()
    }
    decision = decide(
        so_far.goal,
        stock,
        final,
        out,
        rounds=so_far.budget.confirm_rounds if confirmed else 0,
        is_confirmed=bool(confirmed),
        bound_by=bound_by,
    )
    chosen = [entry for entry in points if entry.trial.number == decision.recommended]
    is_met = decision.outcome is not Outcome.INFEASIBLE
    found = next((regret(entry.trial) for entry in chosen if is_met), None)
    more = [
        *_loads(decision, {**{e.trial.number: e.measurement for e in points}, **confirmed}),
        *(said for entry in chosen if (said := gates.vouched(entry))),
        *([] if found is None else [f"by all trials of the search together, {found.says}"]),
        *([untried] if untried and not is_met else []),
        *doubts(workload, concurrency, is_confirmed=bool(confirmed)),
    ]
    update = {
        "reasons": (*decision.reasons, *more),
        "regret": found,
        "prices": _prices(so_far, confirmed, decision),
        "front": so_far.front(confirmed),
    }
    return decision.model_copy(update=update)


def _prices(
    so_far: SoFar, confirmed: Mapping[int, Measurement], decision: Decision
) -> tuple[Price, ...]:
    """What each step of harm buys; none where no harm was measured."""
    quality, missed = so_far.quality, so_far.missed
    points = [
        replace(entry, measurement=missed.get(entry.trial.number, entry.measurement))
        for entry in so_far.distinct
    ]
    numbers = [entry.trial.number for entry in points]
    reports = {n: found for n in numbers if quality and (found := quality.report(n))}
    offers = offers_of(so_far.goal, points, so_far.gates, reports, confirmed, decision.rejected)
    if all(offer.harm is Harm.LOSSLESS for offer in offers):
        return ()
    decided = {}
    if decision.recommended is not None and decision.gain_ratio is not None:
        decided[decision.recommended] = decision.gain_ratio
    size = "" if quality is None else str(quality.rules.size)
    return price_list(so_far.goal, offers, confirmed, size=size, decided=decided)


def _loads(decision: Decision, found: Mapping[int, Measurement]) -> list[str]:
    """Which load the recommended trial and the defaults hold, where that was looked for."""
    told = []
    for who, number in (("it", decision.recommended), ("stock", decision.baseline)):
        said = boundary_text(found[number]) if number is not None and number in found else ""
        if said and not (who == "stock" and number == decision.recommended):
            told.append(f"{who} {said}")
    return told
