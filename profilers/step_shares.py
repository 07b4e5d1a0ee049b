"""How the time of a mean step divides: as fitted to this server, or as an ideal device would.

Both follow the roofline view of a decode step: weights are read once a step, KV once a sequence,
and arithmetic grows with the tokens computed. Only the fitted division sees what launching and
scheduling cost. Sequences that share a prefix read the same blocks, which caches closer than the
memory then hold: a probe's contexts share nothing, so for such loads its price of KV is the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtune.profilers.window import READ_BYTES, WRITE_BYTES, Window
from kvtune.types import Bottleneck

MISFIT_MOST_RATIO = 1.5
"""A model that predicts half as much again as a mean step took was fitted to other steps."""

SHARED_LEAST_SHARE = 0.1
"""Less of the prompts from the prefix cache leaves reads of KV as they are without sharing."""

RIDGE_LEAST_TOKENS = 15.0
"""Two cores of a server without AMX reached 17 flop/byte (1.0 Tflop/s, 58 GB/s)."""

RIDGE_MOST_EFFECT_SHARE = 0.1
"""Where an unknown ridge moves more than a tenth of the time, shares would be a guess."""

PEAK_MOST_SHARE = 1.2
"""More than a peak is no measurement: the peak was taken at a bad moment or the data sat in a CPU
cache."""


class StepModel(NamedTuple):
    """Shares of a mean step's time on an ideal device; they add up to 1.

    Fixed costs of launching and scheduling and the arithmetic of attention are not in it.
    """

    arithmetic: float
    weight_reads: float
    kv_reads: float


@dataclass(frozen=True, slots=True)
class FittedStep:
    """Shares of a mean step's time by the step-time model; they add up to at most 1.

    `fixed` is what every step pays, whatever is in it: `weights` plus `overhead`, which are `None`
    where the ceiling of the device or the bytes of the weights are not known. `per_sequence` is the
    work of each decoded token, `prefill` what the model of a decode step does not explain while
    prompts are computed. `kv_low` and `kv_high` bound `kv` as the model's interval does.
    """

    fixed: float
    weights: float | None
    overhead: float | None
    per_sequence: float
    prefill: float
    kv: float
    kv_low: float | None
    kv_high: float | None

    @property
    def compute(self) -> float:
        """The share that grows with the tokens computed."""
        return self.per_sequence + self.prefill


def step_model(window: Window, ridge_tokens: float | None = None) -> StepModel | None:
    """How a mean step divides between prefill arithmetic, weight reads and KV reads.

    At the window's ridge, or at another one.
    """
    prefill_tokens, kv_bytes = window.prefill_tokens_per_step, window.kv_bytes_per_step
    if prefill_tokens is None or kv_bytes is None or not window.weight_bytes:
        return None
    arithmetic = prefill_tokens / (ridge_tokens or window.ridge_tokens)
    kv_reads = kv_bytes / window.weight_bytes
    total = arithmetic + 1 + kv_reads
    return StepModel(arithmetic / total, 1 / total, kv_reads / total)


def slow_arithmetic_share(window: Window) -> float | None:
    """The share of prefill arithmetic on a slow device; `None` where this one's speed is known.

    Devices differ twentyfold in how much arithmetic they do while they read a byte.
    """
    slow = step_model(window, RIDGE_LEAST_TOKENS)
    return None if slow is None or window.measured_ridge_tokens is not None else slow.arithmetic


def predicted_ratio(window: Window) -> float | None:
    """What the step-time model predicts for the decoding of a mean step, over what a step took."""
    costs, observed_s = _costs(window), window.mean_step_s
    return costs.total_s / observed_s if costs is not None and observed_s else None


def fitted_step(window: Window) -> FittedStep | None:
    """Divide a mean step by the step-time model; `None` without one, or where it does not fit."""
    model, costs = window.step_time, _costs(window)
    sequences = window.sequences_per_step
    if model is None or costs is None or not costs.total_s or sequences is None:
        return None
    ratio = predicted_ratio(window)
    if ratio is not None and ratio > MISFIT_MOST_RATIO:
        return None
    total_s = max(costs.total_s, window.mean_step_s or 0.0)
    weights = overhead = None
    if model.weight_read_s is not None:
        weights = min(model.weight_read_s, costs.fixed_s) / total_s
        overhead = costs.fixed_s / total_s - weights
    prefill_tokens = window.prefill_tokens_per_step
    prefill_s = total_s - costs.total_s
    if prefill_tokens is not None and prefill_tokens < sequences:
        # Few prompt tokens can't explain much: at most what as many decoded ones cost.
        prefill_s = min(prefill_s, prefill_tokens * costs.sequences_s / sequences)
    kv, kv_low, kv_high = (
        None if kv_s is None else min(1.0, max(0.0, kv_s) / total_s)
        for kv_s in (costs.kv_s, costs.kv_low_s, costs.kv_high_s)
    )
    return FittedStep(
        fixed=costs.fixed_s / total_s,
        weights=weights,
        overhead=overhead,
        per_sequence=costs.sequences_s / total_s,
        prefill=prefill_s / total_s,
        kv=kv or 0.0,
        kv_low=kv_low,
        kv_high=kv_high,
    )


def traffic_share(window: Window) -> float | None:
    """Memory traffic while busy, as a share of the device's peak.

    Without the engine's own estimate: weights and KV read once a step. The estimate knows nothing
    of what kvtune's plugin skips; where nobody knows how much that is, it is left aside.
    """
    kv_bytes, steps = window.kv_bytes_per_step, window.steps or 0.0
    read, written = window.estimate(READ_BYTES), window.estimate(WRITE_BYTES) or 0.0
    traffic_bytes = None
    if read is not None and window.kv_read_share == 1:
        traffic_bytes = read + written
    elif read is not None and kv_bytes is not None:
        skipped_bytes = kv_bytes * (1 / window.kv_read_share - 1) * steps
        traffic_bytes = max(0.0, read - skipped_bytes) + written
    elif window.weight_bytes and kv_bytes is not None:
        traffic_bytes = (window.weight_bytes + kv_bytes) * steps
    if traffic_bytes is None or window.peak_bytes_per_s is None or not window.busy_s:
        return None
    return traffic_bytes / window.busy_s / window.peak_bytes_per_s


def weight_traffic_share(window: Window) -> float | None:
    """Weights read once a step, as a share of the device's peak bytes/s while busy.

    `None` where the whole traffic is more than the peak, which discredits the peak.
    """
    traffic, step_s = traffic_share(window), window.mean_step_s
    if not window.weight_bytes or not window.peak_bytes_per_s or not step_s:
        return None
    if traffic is not None and traffic > PEAK_MOST_SHARE:
        return None
    share = window.weight_bytes / step_s / window.peak_bytes_per_s
    return share if share <= PEAK_MOST_SHARE else None


def explained_share(window: Window) -> float | None:
    """What an ideal device would need for a mean step, over what it took, at measured ceilings."""
    ideal, weights = step_model(window), weight_traffic_share(window)
    if ideal is None or weights is None or window.measured_ridge_tokens is None:
        return None
    return weights / ideal.weight_reads


def shares_of(window: Window) -> dict[Bottleneck, float]:
    """Divide a mean step among bottlenecks, in decreasing order; at most 1 in all.

    By the step-time model where there is one. Else by what an ideal device would need, as shares of
    what the steps took where the device's ceilings are known (a lower bound of each), or of each
    other where they are not and prompts take little of it. What cannot be told apart, such as
    weight reads and overhead without ceilings, is left out.
    """
    fitted = fitted_step(window)
    if fitted is None:
        return _rounded(_ideal_shares(window))
    shares = {Bottleneck.KV_BANDWIDTH: fitted.kv, Bottleneck.COMPUTE: fitted.compute}
    if fitted.weights is not None and fitted.overhead is not None:
        shares[Bottleneck.WEIGHT_BANDWIDTH] = fitted.weights
        shares[Bottleneck.OVERHEAD] = fitted.overhead
    return _rounded(shares)


class _Costs(NamedTuple):
    """What the decoding of a mean step costs by the step-time model, and the bounds of KV's part.

    The bounds are `None` where the model has none.
    """

    fixed_s: float
    sequences_s: float
    kv_s: float
    kv_low_s: float | None
    kv_high_s: float | None

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.sequences_s + self.kv_s


def _costs(window: Window) -> _Costs | None:
    model = window.step_time
    sequences, kv_tokens = window.sequences_per_step, window.kv_tokens_per_step
    if model is None or sequences is None or kv_tokens is None:
        return None
    fixed_s = max(0.0, model.fixed_s.estimate)
    sequences_s = max(0.0, model.per_sequence_s.estimate) * sequences
    per_token = model.per_kv_token_s
    low_s, high_s = (
        None if value_s is None else value_s * kv_tokens
        for value_s in (per_token.low, per_token.high)
    )
    costs = _Costs(fixed_s, sequences_s, max(0.0, per_token.estimate) * kv_tokens, low_s, high_s)
    observed_s = window.mean_step_s
    shared = window.prefix_hits or 0.0
    if observed_s is None or costs.total_s <= observed_s or shared < SHARED_LEAST_SHARE:
        return costs
    left_s = max(0.0, observed_s - fixed_s - sequences_s)
    # What is left may hold the arithmetic of prompts too, so at least that much less is KV's.
    prefill_tokens = window.prefill_tokens_per_step
    prompts_s = left_s
    if prefill_tokens is not None:
        prompts_s = sequences_s / sequences * prefill_tokens if sequences else 0.0
    return costs._replace(
        kv_s=left_s,
        kv_low_s=None if low_s is None else min(max(0.0, left_s - prompts_s), low_s),
        kv_high_s=None if high_s is None else min(left_s, high_s),
    )


def _ideal_shares(window: Window) -> dict[Bottleneck, float]:
    ideal = step_model(window)
    if ideal is None:
        return {}
    # All three are in units of one read of the weights, whose share of the step is known.
    scale = explained_share(window)
    if scale is None:
        slow = slow_arithmetic_share(window)
        if slow is not None and slow - ideal.arithmetic > RIDGE_MOST_EFFECT_SHARE:
            return {}
        return {
            Bottleneck.KV_BANDWIDTH: ideal.kv_reads,
            Bottleneck.COMPUTE: ideal.arithmetic,
        }
    scale = min(scale, 1.0)
    return {
        Bottleneck.WEIGHT_BANDWIDTH: ideal.weight_reads * scale,
        Bottleneck.KV_BANDWIDTH: ideal.kv_reads * scale,
        Bottleneck.COMPUTE: ideal.arithmetic * scale,
    }


def _rounded(shares: Mapping[Bottleneck, float]) -> dict[Bottleneck, float]:
    """Largest first. Rounded down, so that they never add up to more than 1."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {bottleneck: int(share * 1000) / 1000 for bottleneck, share in ordered}
