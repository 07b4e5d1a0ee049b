"""When asking a finalist is of no use: it cannot prove the limits, or it has lost already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtune.autotune.quality.answers import Pass, Questions, answers_to, report_on, whole
from kvtune.autotune.quality.seen import Seen
from kvtune.autotune.quality.wants import EVEN
from kvtune.profilers.quality.compare import Asked, compare
from kvtune.profilers.quality.limits import limit_text
from kvtune.profilers.quality.suite import Size
from kvtune.types import QualityReport

NO_MORE = "it was asked no further: answers to more suites cannot mend what failed"


def unprovable(questions: Questions, seen: Seen) -> str | None:
    """Why a candidate is more likely not to prove its limits with all that can be asked, if so."""
    if questions.chance >= EVEN:
        return None
    worst = min(questions.too_few, key=lambda one: one.chance)
    more = len(questions.too_few) - 1
    alike = f" (and so with {more} more)" if more else ""
    nearest = f" ({limit_text(worst.wider)!r} could be proved)" if worst.wider else ""
    return (
        f"it is not asked as a finalist, as it would hardly prove the limits: {shown(seen)}, and "
        f"{worst.wants}, and {worst.asked} can be asked{alike}; what would make it possible: "
        f"a wider limit{nearest}, or fewer of them (--quality)"
    )


def no_time(questions: Questions, seen: Seen, needed_s: float) -> str:
    """Why a candidate is not asked what would take so long, with the stock defaults."""
    return (
        f"no time was left for the questions of quality at {questions.plan.size} size: "
        f"{shown(seen)}, so a proof takes {questions.count} items of it, and of the stock defaults "
        f"twice as many unless they are known: {about(needed_s)}; what would make it possible: "
        "more --budget-time, wider limits, or fewer of them (--quality)"
    )


def out_of_time(size: Size, needed_s: float) -> str:
    """Why somebody was asked no further who had begun to answer."""
    return (
        f"no time was left to finish the questions of quality at {size} size, {about(needed_s)} "
        "more; the answers so far are kept, and the same command goes on from there"
    )


def lost_for_sure(
    questions: Questions,
    model: str,
    one: Pass,
    known: Mapping[str, Asked],
    newest: Sequence[str],
    theirs: Asked,
    unscored: str = "",
) -> QualityReport | None:
    """The report of a candidate that no answers to more suites can save; `None` if some can.

    `known` are its answers so far, by suite, `newest` those that were not looked at yet, `theirs`
    the baseline's to all questions, `unscored` as in `report_on`. A figure fails here at the
    multiplicity of the whole report: as if the candidate had answered the rest as the baseline did,
    whose figures then count as any.
    Each is tested once, on all of its items, so looking early makes no false failure likelier. The
    baseline's second run is not waited for: beside it the outcome may be unclear in place of a
    failure, but no pass, as the interval of such a figure lies beyond its limit.
    """

    def part(names: Sequence[str]) -> Questions:
        return replace(questions, suites=tuple(s for s in questions.suites if s.name in names))

    def is_lost(asked: Questions, parts: Mapping[str, Asked]) -> bool:
        by_name = {suite.name: suite for suite in asked.suites}
        ours = whole(asked, one, parts)
        beside = answers_to(asked, theirs)
        found = compare(ours, beside, None, questions.limits, suites=by_name)
        return found.outcome == "fail"

    if not is_lost(part(newest), known):
        return None  # Fewer figures are corrected for here, so it fails nowhere else either.
    beside = answers_to(questions, theirs)
    alone = {suite.name: beside.model_copy(update={"suites": (suite,)}) for suite in beside.suites}
    if not is_lost(questions, {**alone, **known}):
        return None
    asked = part(list(known))
    ours, beside = whole(asked, one, known), answers_to(asked, theirs)
    report = report_on(asked, model, ours, beside, None, unscored=unscored)
    return report.model_copy(update={"warnings": (*report.warnings, NO_MORE)})


def shown(seen: Seen) -> str:
    """What a screen showed, in a few words."""
    if not seen.items:
        return "its screen did not tell what changes"
    own, stock = (f"{100 * share:.2g}%" for share in (seen.changed, seen.stock))
    return (
        f"its screen showed {own} of {seen.items} answers changed (of the stock defaults' by "
        f"themselves {stock})"
    )


def about(seconds_s: float) -> str:
    """A time in words."""
    if seconds_s < 120:
        return f"about {seconds_s:.0f} s"
    return f"about {math.ceil(seconds_s / 60)} min"
