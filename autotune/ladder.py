"""The ladder of a search: which levers each rung opens, why others stay closed, and when it climbs.

L0 are stock defaults. L1 are lossless settings, all tried together: taken one by one they miss what
they do only together. L2 are settings that hardly change answers, L3 those that may do so a lot.
What a lever relieves, and so which the verdict closes, is for `space` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtune.autotune.space import SearchSpace, build_space
from kvtune.policies.base import Context, policies
from kvtune.policies.method import ArchitectureMethod, Method, methods
from kvtune.types import Harm

STOCK = "L0"
RUNGS: Mapping[Harm, str] = {Harm.LOSSLESS: "L1", Harm.NEAR_LOSSLESS: "L2", Harm.LOSSY: "L3"}
"""The rung that settings of each class of harm are on; stock defaults alone are `STOCK`."""

SHARES: Mapping[Harm, float] = {Harm.LOSSLESS: 0.6, Harm.NEAR_LOSSLESS: 0.8}
"""Share of the trials after which a goal that settings up to this harm miss opens the next rung."""

UNLIKELY, UNLIKELY_TRIALS = 0.05, 4
"""Chance of an unmeasured point to meet the goal below which the next rung opens at once, and the
trials that must have been measured before anybody believes it."""

NOT_SERVED = "no engine at hand serves it"
SETTINGS: Mapping[Harm, str] = {
    Harm.LOSSLESS: "lossless settings",
    Harm.NEAR_LOSSLESS: "settings that may change answers",
    Harm.LOSSY: "lossy settings",
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung above stock defaults.

    `space` is what may be tried on it, what lower rungs opened included. It `opens` knobs, and
    `knob=value` where a list gets longer; empty if nothing of its harm can be tried. `closed` maps
    a lever of its harm, or `knob=value`, to why it is not tried.
    """

    harm: Harm
    space: SearchSpace
    opens: tuple[str, ...]
    closed: Mapping[str, str]

    @property
    def name(self) -> str:
        """L1, L2 or L3."""
        return RUNGS[self.harm]

    @property
    def says(self) -> str:
        """What it opens and which levers stay closed, in one sentence.

        Single values are named where they are all that there is to a rung.
        """
        how = "tried together" if self.harm is Harm.LOSSLESS else "tried if the goal is missed"
        opened = f", {how}: {', '.join(self.opens)}" if self.opens else ": nothing to try here"
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.closed.items():
            if "=" not in name or self.harm is Harm.LOSSY:
                by_reason.setdefault(reason, []).append(name)
        closed = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
        told = f"; not tried, {'; '.join(closed)}" if closed else ""
        return f"{self.name}, {self.harm} settings{opened}{told}"


@dataclass(frozen=True, slots=True)
class Stand:
    """How the trials up to a rung stand.

    `met` of `trials` meet the goal and may be shipped as far as it is known. `spent` is the share
    of the budget that is used, in trials or in seconds, whichever is more, after `tried` trials of
    any kind. `is_exhausted` when nothing is left to try. `missed` more of just this rung met the
    goal, but not when they were confirmed.
    """

    met: int
    trials: int
    tried: int
    spent: float
    is_exhausted: bool = False
    missed: int = 0


def ladder(ctx: Context, most: Harm) -> tuple[Rung, ...]:
    """The rungs of a search that does no more harm than `most`, from L1 up.

    Rungs above L1 that have nothing to try are there too: they say why.
    """
    found: list[Rung] = []
    order = list(Harm)
    for harm in order[: order.index(most) + 1]:
        space = build_space(ctx, harm=harm)
        below = found[-1].space if found else SearchSpace((), {})
        found.append(Rung(harm, space, _opened(below, space), _closed(space, harm)))
    return tuple(found)


def next_step(
    rung: Rung,
    above: Rung,
    stand: Stand,
    chance: Callable[[], float],
    *,
    is_asked_for: bool = False,
) -> str:
    """Why the rung `above` may be tried from now on; empty while it may not.

    Never once something up to `rung` meets the goal, unless harm was asked for. Else when what met
    it does not when it is confirmed, when nothing is left there, when its share of the budget is
    spent, or when the `chance` of its unmeasured points to meet the goal is small. That takes a
    moment to know, so it is asked last.
    """
    if not above.opens:
        return ""
    if is_asked_for:
        return "it was asked for"
    if not rung.space.knobs:
        return f"no {rung.harm} setting can be searched here"
    if stand.met:
        return ""
    if stand.missed:
        return "those that met the goal in the search missed it when they were confirmed"
    if stand.is_exhausted:
        return f"no {rung.harm} configuration is left"
    if stand.spent >= SHARES[rung.harm]:
        return f"the {rung.harm} share of the budget is spent and the goal is missed"
    if stand.tried >= UNLIKELY_TRIALS and chance() < UNLIKELY:
        return f"no {rung.harm} configuration that is left is likely to meet the goal"
    return ""


def unlocked(rung: Rung, above: Rung, stand: Stand, why: str) -> str:
    """What is said when `above` opens."""
    return (
        f"{SETTINGS[above.harm]} are tried from here on: {why}; {stand.met} of {stand.trials} "
        f"{rung.harm} trials met the goal by then"
    )


def untried(rungs: Sequence[Rung], harms: Collection[Harm]) -> list[Rung]:
    """The rungs that have something of their own to try, which no trial of these `harms` was."""
    return [rung for rung in rungs if rung.opens and rung.harm not in harms]


def _opened(below: SearchSpace, space: SearchSpace) -> tuple[str, ...]:
    known = {entry.knob.name: entry.knob.choices for entry in below.knobs}
    found: list[str] = []
    for knob in (entry.knob for entry in space.knobs):
        if knob.name not in known:
            found.append(knob.name)
        else:
            new = (choice for choice in knob.choices if choice not in known[knob.name])
            found += [f"{knob.name}={choice}" for choice in new]
    return tuple(found)


def _closed(space: SearchSpace, harm: Harm) -> dict[str, str]:
    """Why levers of just this harm are not tried: policies, values, and what nobody serves."""
    known = {name: policy() for name, policy in policies().items()}
    owners = {entry.knob.name: known[entry.policy] for entry in space.knobs}
    found = {}
    for name, reason in space.refusals.items():
        knob, is_value, value = name.partition("=")
        if not is_value:
            worst = known[knob].harm
        elif knob in owners:
            worst = owners[knob].harm_of({knob: value})
        else:
            continue
        if worst is harm:
            found[name] = reason
    unserved = methods().items() if harm is Harm.LOSSY else ()
    return found | {name: NOT_SERVED for name, one in sorted(unserved) if _is_unserved(one)}


def _is_unserved(method: type[Method]) -> bool:
    if method.harm is not Harm.LOSSY or issubclass(method, ArchitectureMethod):
        return False
    return all(serving.where == "reference" for serving in method.serving)
