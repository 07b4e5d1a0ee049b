"""What a step spends its time on: fitted to the server, else measured, else modelled."""

from __future__ import annotations

from kvtune.profilers.evidence import Signs
from kvtune.profilers.findings import (
    Confidence,
    Finding,
    abstain,
    compute,
    decode_compute,
    fixed_price,
    kv_bandwidth,
    overhead,
    weight_bandwidth,
)
from kvtune.profilers.sign import NAME_CHECKPOINT, Sign
from kvtune.profilers.step_shares import fitted_step
from kvtune.profilers.step_signs import PEAK_LEAST_SHARE, STEP_LEAST_SHARE
from kvtune.profilers.window import Window


def judge_steps(window: Window, signs: Signs) -> Finding:
    """Name what takes most of a mean step, or say that nothing does."""
    return _by_step_time(window, signs) or _by_measured_use(signs) or _by_model(signs)


def _by_step_time(window: Window, signs: Signs) -> Finding | None:
    """From the division fitted to this server; as sure as the model's own interval and error."""
    fitted = fitted_step(window)
    if fitted is None:
        return None
    best: Confidence = "medium" if signs.fit_error.holds else "high"
    if signs.fitted_kv.holds:
        low = fitted.kv_low or 0.0
        sure: Confidence = best if low >= STEP_LEAST_SHARE else "medium" if low > 0 else "low"
        is_slow = signs.fitted_kv_rate.fails
        return kv_bandwidth(
            "medium" if is_slow and sure == "high" else sure,
            f"{fitted.kv:.0%} of a step{_between(fitted.kv_low, fitted.kv_high)}",
            is_slow=is_slow,
        )
    if signs.fitted_compute.holds:
        if fitted.per_sequence > fitted.prefill:
            return decode_compute("medium", f"{fitted.per_sequence:.0%} of a step")
        agreed = signs.arithmetic.holds or signs.computing.holds
        return compute(best if agreed else "medium", f"{fitted.prefill:.0%} of a step")
    if not signs.fitted_fixed.holds:
        return None if signs.fit_error.holds else _mixed_fitted(signs)
    if fitted.weights is None or fitted.overhead is None:
        return fixed_price(f"{fitted.fixed:.0%} of a step")
    # Kernels are not as fast as the measured ceiling: weights take their share at least, and as
    # much of the price as they would at the lowest speed that still keeps the memory busy.
    if fitted.weights >= PEAK_LEAST_SHARE * fitted.fixed:
        sure = best if fitted.weights >= STEP_LEAST_SHARE else "medium"
        return weight_bandwidth(
            sure, f"at least {fitted.weights:.0%} of a step, at the memory's measured speed"
        )
    slow_weights = fitted.weights / PEAK_LEAST_SHARE
    sure = best if fitted.fixed - slow_weights >= STEP_LEAST_SHARE else "medium"
    return overhead(sure, f"{fitted.overhead:.0%} of a step")


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f", between {low:.0%} and {high:.0%}"


def _by_measured_use(signs: Signs) -> Finding | None:
    """From what the GPU measures, or the engine estimates of its work, against the peaks."""
    flops, traffic = signs.computing.value, signs.reading.value
    if flops is None or traffic is None:
        return None
    of_flops = "of peak FLOP/s" if signs.computing is signs.flops else "of the tensor cores' time"
    of_bytes = "of peak bytes/s" if signs.reading is signs.traffic else "of the memory's bandwidth"
    use = f"{flops:.0%} {of_flops}, {traffic:.0%} {of_bytes}"
    if flops + traffic < PEAK_LEAST_SHARE:
        if signs.gpu_sm is not None and signs.gpu_sm.holds:
            return None  # Kernels that are slow for another reason are not launched too rarely.
        return overhead("medium", f"the device is hardly used: {use}")
    if signs.computing.holds and flops > traffic:
        return compute("high", use)
    if not signs.reading.holds:
        return None
    if signs.kv_reads.holds:
        return kv_bandwidth("high", use)
    return _weights_or_overhead(signs, use) if signs.weight_reads.holds else None


def _weights_or_overhead(signs: Signs, why: str) -> Finding:
    """Which of the two, where most of what is read are weights."""
    weights = signs.weight_traffic.value
    if weights is None:
        return fixed_price(why, may_be_compute=signs.slow_arithmetic.holds)
    why = f"weights alone take {weights:.0%} of the memory's speed; {why}"
    if signs.weight_traffic.holds:
        return weight_bandwidth("high" if weights >= STEP_LEAST_SHARE else "medium", why)
    return overhead("medium", why)


def _by_model(signs: Signs) -> Finding:
    """From the division of a mean step on an ideal device, which is weaker evidence.

    It is weak where all that the ideal device would need explains little of what steps took.
    """
    explained = signs.explained.value
    if signs.arithmetic.holds:
        is_weak = signs.explained.fails and not signs.prefill.holds
        sure: Confidence = "low" if is_weak else "medium"
        of = (
            ""
            if explained is None
            else f", and the model explains {explained:.0%} of the real ones"
        )
        return compute(sure, f"{signs.arithmetic.value:.0%} of a modelled step{of}")
    if signs.weight_reads.holds:
        why = f"weights are {signs.weight_reads.value:.0%} of a modelled step"
        return _weights_or_overhead(signs, why)
    if signs.kv_reads.holds:
        why = f"{signs.kv_reads.value:.0%} of a modelled step"
        if signs.reading.fails:
            return overhead(
                "low", f"KV would be {why}, but memory traffic is {signs.reading.value:.0%} of peak"
            )
        return kv_bandwidth("medium" if signs.reading.holds else "low", why)
    if signs.arithmetic.value is not None:
        return _mixed("of a modelled step", signs.arithmetic, signs.weight_reads, signs.kv_reads)
    if signs.prefill.holds:
        return compute("low", f"{signs.prefill.value:.0%} of the requests' time is prefill")
    return abstain(
        "Decoding takes most of the requests' time, but whether it reads KV or weights cannot be "
        "told.",
        f"To tell them apart, {NAME_CHECKPOINT}.",
    )


def _mixed_fitted(signs: Signs) -> Finding:
    return _mixed("of a step", signs.fitted_compute, signs.fitted_fixed, signs.fitted_kv)


def _mixed(of: str, arithmetic: Sign, fixed: Sign, kv: Sign) -> Finding:
    return abstain(
        f"No single resource dominates: {of}, arithmetic is {arithmetic.value:.0%}, the fixed "
        f"price with its weights {fixed.value:.0%} and KV reads {kv.value:.0%}.",
        "Profile prefill and decoding apart: the same prompts with one output token, then short "
        "prompts with long outputs.",
    )
