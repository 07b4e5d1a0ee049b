"""What a lever does to the pool, by formula: no load is needed to tell it."""

from __future__ import annotations

from dataclasses import replace

from kvtune.autotune.forecast.levers import Lever
from kvtune.autotune.forecast.replay import System
from kvtune.autotune.forecast.system import system_of
from kvtune.policies.base import Context
from kvtune.policies.method import History
from kvtune.policies.settings import max_model_len_tokens
from kvtune.types import Interval


def system_with(lever: Lever, base: System, ctx: Context) -> System | None:
    """The engine with a lever pulled; None where the size of its pool is not known.

    `base` is the engine without it, and `ctx` is as `as_reported` gives it.
    """
    if lever.arguments:
        return system_of({**ctx.base_arguments, **lever.arguments}, ctx)
    caching = base.limits.prefix_caching and lever.reuses_prefixes
    limits = replace(base.limits, prefix_caching=caching)
    if lever.cuts_prompts:
        return replace(base, limits=limits, kept_ratio=min(lever.resident_ratio, 1.0))
    blocks = 1 + int((base.blocks - 1) / lever.resident_ratio)
    return replace(base, limits=limits, blocks=blocks)


def start_problem(system: System | None, ctx: Context) -> str:
    """Why an engine would not start; empty when it would."""
    if system is None:
        return "the size of the pool is not known"
    longest = max_model_len_tokens(ctx.base_arguments, ctx)
    usable = (system.blocks - 1) * system.block_tokens
    if longest is None or system.blocks_of(longest) < system.blocks:
        return ""
    return (
        f"the engine would refuse it: {usable:,} tokens are less than one request of "
        f"max-model-len {longest:,}"
    )


def sequences_in(system: System, mean: History) -> int:
    """How many sequences as long as `mean` run at once."""
    return min((system.blocks - 1) // system.blocks_at_end(mean), system.limits.max_active)


def counted_ratio(before: float, after: float) -> Interval | None:
    """The ratio of two counts, which has no error; None of a count that was 0."""
    if not before:
        return None
    ratio = after / before
    return Interval(estimate=ratio, low=ratio, high=ratio, unit="ratio", method="by formula")
