"""A mean step of the engine, taken apart into seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtune.profilers.step_shares import fitted_step, predicted_ratio
from kvtune.profilers.window import Window
from kvtune.types import Bottleneck

LEAST_SHARE = 0.005
"""Less is rounding."""

NAMES: Mapping[Bottleneck, str] = {
    Bottleneck.WEIGHT_BANDWIDTH: "reading weights",
    Bottleneck.KV_BANDWIDTH: "reading KV",
    Bottleneck.COMPUTE: "arithmetic",
    Bottleneck.OVERHEAD: "overhead",
}


@dataclass(frozen=True, slots=True)
class StepParts:
    """Shares of a mean step by what they are spent on; they add up to 1.

    `step_s` is `None` where it is not known how long a step took. `is_fitted` tells shares by the
    step-time model of this server from those of an ideal device.
    """

    step_s: float | None
    shares: Mapping[str, float]
    is_fitted: bool


def step_parts(window: Window, ideal: Mapping[Bottleneck, float]) -> StepParts | None:
    """Take a mean step apart by the step-time model, else by the verdict's `ideal` shares."""
    fitted, step_s = fitted_step(window), window.mean_step_s
    if fitted is None:
        shares = {NAMES.get(name, name.value): share for name, share in ideal.items()}
        return None if not shares else StepParts(step_s, _whole(shares), is_fitted=False)
    shares = {"overhead and weights": fitted.fixed}
    if fitted.overhead is not None and fitted.weights is not None:
        shares = {"overhead": fitted.overhead, NAMES[Bottleneck.WEIGHT_BANDWIDTH]: fitted.weights}
    shares |= {
        NAMES[Bottleneck.KV_BANDWIDTH]: fitted.kv,
        "decoding sequences": fitted.per_sequence,
        "prefill": fitted.prefill,
    }
    # A step cannot be shorter than its parts, so where they exceed it they are the step.
    longer = max(1.0, predicted_ratio(window) or 1.0)
    return StepParts(None if step_s is None else longer * step_s, _whole(shares), is_fitted=True)


def _whole(shares: Mapping[str, float]) -> dict[str, float]:
    kept = {name: share for name, share in shares.items() if share >= LEAST_SHARE}
    if (rest := 1 - sum(kept.values())) >= LEAST_SHARE:
        kept["not told apart"] = rest
    return kept
