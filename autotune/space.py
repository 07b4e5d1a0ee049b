"""What a search may try: the knobs of all policies that apply here, and why the rest do not.

Everything here is pure. A point of the space is a mapping from knob name to value; `stack_from`
turns any such mapping into a stack that the engine accepts, so a search cannot ask for nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support, describe_range, policies
from kvtune.policies.capacity import shortfall
from kvtune.policies.settings import settings_of
from kvtune.policies.stack import RULES, Rule, broken_rules, compose, position
from kvtune.types import Bottleneck, Choice, Harm, PolicyStack

RELIEF: Mapping[Bottleneck, frozenset[str]] = {
    Bottleneck.KV_CAPACITY: frozenset({"capacity"}),
    Bottleneck.PREFIX_THRASH: frozenset({"capacity"}),
    Bottleneck.KV_BANDWIDTH: frozenset({"bandwidth"}),
    Bottleneck.COMPUTE: frozenset(),
    Bottleneck.BATCH_WIDTH: frozenset(),
    Bottleneck.OVERHEAD: frozenset(),
    Bottleneck.WEIGHT_BANDWIDTH: frozenset(),
    Bottleneck.IDLE: frozenset(),
}
"""What a lever on keys and values has to save where something binds; nothing helps that is not
there. Without a verdict everything may."""


@dataclass(frozen=True, slots=True)
class SpaceKnob:
    """A knob of a policy in a space; `active_when` maps earlier knobs to the values it needs.

    `harm` is the worst that one of its values does.
    """

    policy: str
    knob: Knob
    active_when: Mapping[str, tuple[JsonValue, ...]] | None
    because: str
    harm: Harm = Harm.LOSSLESS

    @property
    def key(self) -> str:
        """The name under which values are kept: a list that was kept once can get no longer."""
        return f"{self.knob.name} {self.harm}" if self.harm is Harm.LOSSY else self.knob.name

    def is_active(self, values: Mapping[str, JsonValue]) -> bool:
        """Whether this knob matters, given a value for each knob that it depends on."""
        conditions = self.active_when or {}
        return all(values.get(name) in allowed for name, allowed in conditions.items())


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be tried. `refusals` maps a policy, or `knob=value`, to the reason.

    A knob comes after those that it depends on. `choices` keeps what policies made of values, and
    of which context: thousands of points differ in how they combine few choices.
    """

    knobs: tuple[SpaceKnob, ...]
    refusals: dict[str, str]
    choices: dict[tuple[str, str], tuple[Context, Choice]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def defaults(self) -> dict[str, JsonValue]:
        """The values that give stock defaults."""
        return {entry.knob.name: entry.knob.default for entry in self.knobs}


def build_space(ctx: Context, *, harm: Harm) -> SearchSpace:
    """Collect what may be tried here, up to a harm class.

    Args:
        ctx: what is known about engine, device, model and workload.
        harm: the worst harm class to offer.
    """
    known = policies()
    knobs: list[SpaceKnob] = []
    still: dict[str, JsonValue] = {}
    refusals: dict[str, str] = {}
    for name in sorted(known, key=position):
        policy = known[name]()
        support = policy.supports(ctx)
        if reason := _too_harmful(policy.harm, harm) or unhelpful(policy, ctx):
            support = Support.no(reason)
        if not support.ok:
            refusals[name] = support.reason
            continue
        refused = policy.refused_values(ctx)
        offered = [_within(harm, knob, policy, refused) for knob in policy.knobs(ctx)]
        allowed = [entry for entry in offered if _is_open(entry.knob)]
        knobs += allowed
        still |= {one.knob.name: one.knob.default for one in offered if one not in allowed}
        if not allowed:
            refusals[name] = "there is only one value to try"
        if offered:
            refusals |= refused
    linked = _linked(knobs, still, refusals)
    return _that_fit(SearchSpace(linked, refusals), ctx)


def unhelpful(policy: Policy, ctx: Context) -> str:
    """Why a lever that may change answers cannot help, by the verdict; empty when it may.

    Lossless levers act together, so none of them is closed by itself. A verdict that is less than
    sure closes nothing.
    """
    verdict = ctx.verdict
    if policy.harm is Harm.LOSSLESS or verdict is None or verdict.confidence != "high":
        return ""
    wanted = RELIEF.get(verdict.bottleneck)
    if wanted is None or wanted & policy.relieves(ctx):
        return ""
    bound = f"the workload is bound by {verdict.bottleneck.value}"
    if not wanted:
        return f"{bound}, not by the KV cache"
    return f"{bound}, and it saves {' and '.join(sorted(policy.relieves(ctx)))} only"


def stack_from(space: SearchSpace, values: Mapping[str, JsonValue], ctx: Context) -> PolicyStack:
    """Turn a point into the stack that serves it.

    A value outside its range becomes the nearest one, a knob that is not named is at its default,
    names that the space does not have are ignored, and so are knobs that are not active. Values
    that do not go together are moved by the rules of `kvtune.policies.stack`, always the same way.
    """
    point = {
        entry.knob.name: entry.knob.nearest(values.get(entry.knob.name, entry.knob.default))
        for entry in space.knobs
    }
    point = _without_inactive(space, point)
    for _ in RULES:  # A pass mends one rule, and no repair brings back a rule mended before.
        broken = broken_rules(_build(space, point, ctx), ctx)
        if not broken:
            break
        point = _without_inactive(space, _mend(space, point, broken[0], ctx))
    return _build(space, point, ctx)


def infeasible_reason(stack: PolicyStack, ctx: Context) -> str | None:
    """Say why the engine would refuse to start with this stack; None if nothing is known to."""
    for rule in broken_rules(stack, ctx):
        if rule.effect == "refused":
            return rule.reason
    return shortfall({**ctx.base_arguments, **stack.arguments}, ctx)


def dry_run_text(space: SearchSpace) -> str:
    """Return what would be tried and what would not, with reasons, as plain text."""
    count = prod(len(entry.knob.choices) or 1 for entry in space.knobs)
    lines = [f"knobs: {len(space.knobs)}, at most {count:,} combinations"]
    for entry in space.knobs:
        knob = entry.knob
        unit = f" {knob.unit}" if knob.unit else ""
        lines.append(f"  {knob.name}: {describe_range(knob)}{unit} (default {knob.default})")
        lines.append(f"    {entry.because}")
        for name, allowed in (entry.active_when or {}).items():
            lines.append(f"    only when {name} is {' or '.join(map(str, allowed))}")
    by_reason: dict[str, list[str]] = {}
    for name, reason in space.refusals.items():
        by_reason.setdefault(reason, []).append(name)
    if by_reason:
        lines.append("not offered:")
    lines += [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join(lines)


def _too_harmful(harm: Harm, most: Harm) -> str:
    order = list(Harm)
    is_worse = order.index(harm) > order.index(most)
    return f"it is {harm.value}, and this search is {most.value}" if is_worse else ""


def _within(most: Harm, knob: Knob, policy: Policy, refused: dict[str, str]) -> SpaceKnob:
    """The knob with the values that do no more harm than `most`; the others are `refused`."""
    harms = {choice: policy.harm_of({knob.name: choice}) for choice in knob.choices}
    worse = {choice: why for choice, harm in harms.items() if (why := _too_harmful(harm, most))}
    refused |= {f"{knob.name}={choice}": why for choice, why in worse.items()}
    left = [harm for choice, harm in harms.items() if choice not in worse]
    if worse:
        kept = tuple(choice for choice in knob.choices if choice not in worse)
        knob = replace(knob, choices=kept)
    worst = max(left, key=list(Harm).index, default=policy.harm)
    return SpaceKnob(policy.name, knob, knob.active_when, knob.because, worst)


def _that_fit(space: SearchSpace, ctx: Context) -> SearchSpace:
    """The space without values that fit into the pool together with no other value of it.

    Which values fit with which is for each point to say, see `infeasible_reason`.
    """
    refusals = dict(space.refusals)
    knobs: list[SpaceKnob] = []
    still: dict[str, JsonValue] = {}
    for entry in space.knobs:
        knob = entry.knob
        misfits = {
            choice: reason
            for choice in knob.choices
            if (reason := _misfit(space, knob, choice, ctx))
        }
        if len(misfits) == len(knob.choices):
            misfits = {}  # Whatever does not fit, it is not for this knob to mend.
        misfits.pop(knob.default, None)
        if misfits:
            kept = tuple(choice for choice in knob.choices if choice not in misfits)
            entry = replace(entry, knob=replace(knob, choices=kept))
            refusals |= {f"{knob.name}={choice}": why for choice, why in misfits.items()}
        if _is_open(entry.knob):
            knobs.append(entry)
        else:
            still[knob.name] = knob.default
            refusals[entry.policy] = "there is only one value to try"
    return SearchSpace(_linked(knobs, still, refusals), refusals)


def _misfit(space: SearchSpace, knob: Knob, choice: JsonValue, ctx: Context) -> str | None:
    """Why a value fits with nothing; None if it may."""
    alone = {**space.defaults, knob.name: choice}
    reason = _shortfall(space, alone, ctx)
    others = [entry.knob for entry in space.knobs if entry.knob is not knob] if reason else []
    for other in others:
        for value in other.choices:
            if _shortfall(space, {**alone, other.name: value}, ctx) is None:
                return None
    return reason


def _shortfall(space: SearchSpace, point: Mapping[str, JsonValue], ctx: Context) -> str | None:
    return shortfall({**ctx.base_arguments, **_build(space, point, ctx).arguments}, ctx)


def _is_open(knob: Knob) -> bool:
    """Whether there is more than one value."""
    return len(knob.choices) > 1 or not knob.choices


def _linked(
    knobs: Sequence[SpaceKnob], still: Mapping[str, JsonValue], refusals: dict[str, str]
) -> tuple[SpaceKnob, ...]:
    """The knobs without conditions on those that the space does not have.

    Knobs with one value are `still` at it: what needs another one of them is refused. Others are
    fixed by the user, and policies that depend on them look at that themselves.
    """
    names = {entry.knob.name for entry in knobs}
    found: list[SpaceKnob] = []
    for entry in knobs:
        conditions = entry.active_when or {}
        missed = [
            name
            for name, allowed in conditions.items()
            if name in still and still[name] not in allowed
        ]
        if missed:
            refusals[entry.policy] = f"{missed[0]} has no value to try that it goes with"
            continue
        left = {name: allowed for name, allowed in conditions.items() if name in names}
        found.append(replace(entry, active_when=left or None))
    return tuple(found)


def _without_inactive(space: SearchSpace, point: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the point with every knob that does not matter at its default."""
    kept = dict(point)
    for entry in space.knobs:
        if not entry.is_active(kept):
            kept[entry.knob.name] = entry.knob.default
    return kept


def _build(space: SearchSpace, point: Mapping[str, JsonValue], ctx: Context) -> PolicyStack:
    parameters: dict[str, dict[str, JsonValue]] = {}
    for entry in space.knobs:
        parameters.setdefault(entry.policy, {})[entry.knob.name] = point[entry.knob.name]
    return compose(_choice(space, name, chosen, ctx) for name, chosen in parameters.items())


def _choice(
    space: SearchSpace, policy: str, parameters: dict[str, JsonValue], ctx: Context
) -> Choice:
    key = policy, repr(parameters)  # 1 and True are equal, and not the same value.
    known = space.choices.get(key)
    if known is None or known[0] is not ctx:
        known = space.choices[key] = ctx, policies()[policy]().choice(parameters, ctx)
    return known[1]


def _mend(
    space: SearchSpace, point: Mapping[str, JsonValue], rule: Rule, ctx: Context
) -> dict[str, JsonValue]:
    """Move the first knob that can mend a rule: to the nearest value if refused, off if dead."""
    knobs = {entry.knob.name: entry.knob for entry in space.knobs}
    for name in (name for name in rule.repairs if name in knobs):
        for value in _nearest_first(knobs[name], point[name], rule):
            moved = {**point, name: value}
            arguments = {**ctx.base_arguments, **_build(space, moved, ctx).arguments}
            if not rule.broken(settings_of(arguments, ctx)):
                return moved
    return {**point, **{name: knobs[name].default for name in rule.repairs if name in knobs}}


def _nearest_first(knob: Knob, value: JsonValue, rule: Rule) -> list[JsonValue]:
    if rule.effect == "dead" or value not in knob.choices:
        return [knob.default]
    here = knob.choices.index(value)
    return sorted(knob.choices, key=lambda choice: abs(knob.choices.index(choice) - here))
