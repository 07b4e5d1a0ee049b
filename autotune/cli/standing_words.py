"""Where a search stands in words, the same in the live view and in lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtune.autotune.words import digits, duration

if TYPE_CHECKING:
    from kvtune.autotune.search_view import Incumbent, Margin, Plan, SearchView

MET: Mapping[bool, str] = {True: "meets the goal", False: "misses the goal"}


def best_text(view: SearchView, best: Incumbent) -> str:
    """What the best trial so far has of the objective."""
    said = f"{view.objective} {digits(best.value)} {view.unit}"
    if best.number and best.over_stock is not None:
        said += f", {digits(best.over_stock)} times stock"
    return said


def used_text(margin: Margin) -> str:
    """How much of a limit is used up."""
    if margin.value_s is None:
        return "not measured"
    return f"{margin.value_s / margin.limit_s:.0%}, {duration(margin.value_s)}"


def left_text(view: SearchView, passed_s: float = 0.0, price_per_hour: float | None = None) -> str:
    """Trials, time and money that are left, `passed_s` after the search stood so."""
    plan = view.plan
    said = [f"{plan.trials} of {view.most} trials"]
    expected_s = max(0.0, plan.expected_s - passed_s)
    if plan.left_s != math.inf:
        said.append(f"{clock(max(0.0, plan.left_s - passed_s))} of time")
    elif plan.trial_s:
        said.append(f"about {clock(expected_s)}")
    if price_per_hour is not None and plan.trial_s:
        said.append(f"about {expected_s / 3600 * price_per_hour:.2f} to pay")
    return ", ".join(said)


def plan_text(plan: Plan) -> str:
    """What is left goes to."""
    count = plan.affordable
    trials = f"up to {count} trial{'' if count == 1 else 's'}" if count else "no more trials"
    if not plan.trial_s:
        return trials
    each = f" of {duration(plan.trial_s)}" if count else ""
    said = [trials + each, f"confirmation {clock(plan.confirming_s)}"]
    if plan.asking_s:
        said.append(f"questions {clock(plan.asking_s)}")
    return ", ".join(said)


def line_of(view: SearchView, price_per_hour: float | None = None) -> str:
    """All that matters of where a search stands, in a line."""
    said = "best so far: nothing has a number yet"
    if (best := view.best) is not None:
        limits = ", ".join(map(_share_text, best.margins))
        name = f"trial {best.number}" if best.number else "stock defaults"
        said = f"best so far: {name}, {best_text(view, best)}, {MET[best.meets_goal]}"
        said += f" ({limits})" if limits else ""
    return f"{said}; left: {left_text(view, price_per_hour=price_per_hour)}"


def _share_text(margin: Margin) -> str:
    if margin.value_s is None:
        return f"{margin.limit} not measured"
    return f"{margin.value_s / margin.limit_s:.0%} of {margin.limit}"


def clock(seconds: float) -> str:
    """A time in hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
