"""One line of reason for a forecast: the numbers that decide it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from kvtune.autotune.forecast.calibrate import GOODPUT, STEP, Calibration
from kvtune.autotune.forecast.levers import Lever
from kvtune.autotune.forecast.replay import SimulatedRun, System
from kvtune.types import Interval

NEGLIGIBLE = 0.03
"""A change of goodput below this is not worth a trial."""

_FULL = 0.95


def reason_of(
    lever: Lever,
    before: System,
    after: System,
    calibration: Calibration,
    done: SimulatedRun,
    ratios: Mapping[str, Interval | None],
    ranges: Mapping[str, Interval | None],
) -> str:
    """Say what the lever changes, what of that the load feels, and what comes of it.

    `ratios` are bounded by what the model is unsure of, `ranges` by the noise of measurements too.
    """
    seen = calibration.simulated
    facts = []
    tokens = before.capacity_tokens, after.capacity_tokens
    if tokens[0] != tokens[1]:
        facts.append(
            f"{_thousands(tokens[0])} to {_thousands(tokens[1])} KV tokens, "
            f"{'and' if seen.peak_usage >= _FULL else 'but'} the load fills {seen.peak_usage:.0%}"
            + (f" with {seen.preemptions} preemptions" if seen.preemptions else "")
        )
    if lever.read_ratio[1] != 1.0:
        facts.append(
            f"reading KV is {_read_share(calibration):.0%} of a mean decode step, and takes "
            f"{lever.read_ratio[1]:.2g} times as long"
            + (f" ({lever.read_source})" if lever.read_source else "")
        )
    if before.reads != after.reads and seen.mean_sequences:
        facts.append(_sparse(before, after, calibration))
    if lever.load_bytes_per_s is not None:
        speed = f"{lever.load_bytes_per_s[1] / 1e9:.2g} GB/s"
        facts.append(f"what it gives back is assumed to come at {speed}")
    hits = _hit_share(seen), _hit_share(done)
    if round(hits[0], 2) != round(hits[1], 2):
        facts.append(f"{hits[0]:.0%} to {hits[1]:.0%} of prompt tokens come from the cache")
    if before.limits.max_active != after.limits.max_active:
        facts.append(
            f"{before.limits.max_active} to {after.limits.max_active} sequences at once, and "
            f"{seen.peak_running} ran"
        )
    facts = facts or ["nothing that this load feels"]
    return f"{lever.says}: {'; '.join(facts)}{_outcome(ratios, ranges)}{_served(lever)}"


def _outcome(ratios: Mapping[str, Interval | None], ranges: Mapping[str, Interval | None]) -> str:
    for metric, name in ((GOODPUT, "goodput"), (STEP, "a decode step")):
        ratio, told = ratios.get(metric), ranges.get(metric)
        if ratio is not None and told is not None:
            return f"; {name} {_change(ratio, told)}"
    return ""


def _change(ratio: Interval, told: Interval) -> str:
    bounds = [bound for bound in (ratio.estimate, ratio.low, ratio.high) if bound is not None]
    if all(abs(bound - 1) < NEGLIGIBLE for bound in bounds):
        return f"changes by under {NEGLIGIBLE:.0%}, skip"
    if told.low is None or told.high is None:
        return f"{told.estimate - 1:+.0%}"
    return f"{told.estimate - 1:+.0%} ({told.low - 1:+.0%} to {told.high - 1:+.0%})"


def _served(lever: Lever) -> str:
    return f"; reference only: {lever.not_served}" if lever.not_served else ""


def _read_share(calibration: Calibration) -> float:
    """Share of the KV reads in a mean decode step."""
    cost, seen = calibration.cost, calibration.simulated
    read_s = cost.per_kv_token_s * seen.mean_resident_tokens
    step_s = cost.fixed_s + cost.per_sequence_s * seen.mean_sequences + read_s
    return read_s / step_s if step_s else 0.0


def _sparse(before: System, after: System, calibration: Calibration) -> str:
    """What a decode step of the mean context reads of it, before and after."""
    seen = calibration.simulated
    context = round(seen.mean_resident_tokens / seen.mean_sequences)
    requests = calibration.baseline.requests
    prompt = min(round(fmean(one.prompt_tokens for one in requests)), context - 1)
    counts = [
        context if one.reads is None else round(one.reads.decoded(max(context - 1, 0), prompt))
        for one in (before, after)
    ]
    return (
        f"reading KV is {_read_share(calibration):.0%} of a mean decode step, and "
        f"{counts[1]:,} tokens of a mean context are read, not {counts[0]:,}"
    )


def _hit_share(done: SimulatedRun) -> float:
    return done.prefix_hits_tokens / max(done.prefix_queries_tokens, 1)


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 100_000 else f"{tokens:,}"
