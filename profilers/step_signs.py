"""Signs of what a step spends its time on: measured, fitted, or modelled on an ideal device."""

from __future__ import annotations

from kvtune.profilers.kv_reads import PAGES_READ, PAGES_SEEN
from kvtune.profilers.sign import MEASURE_CEILINGS, NAME_CHECKPOINT, PROBE, Sign, make_sign
from kvtune.profilers.step_shares import (
    MISFIT_MOST_RATIO,
    PEAK_MOST_SHARE,
    FittedStep,
    explained_share,
    fitted_step,
    predicted_ratio,
    slow_arithmetic_share,
    step_model,
    traffic_share,
    weight_traffic_share,
)
from kvtune.profilers.window import FLOPS, PREFILL_S, READ_BYTES, Window
from kvtune.types import Evidence

PEAK_LEAST_SHARE = 0.35
"""Kernels under a serving load reach about half of a micro-benchmark's peak, so a third of it
means that the resource is busy most of the time."""

STEP_LEAST_SHARE = 0.5
"""The majority of a step's time."""

PREFILL_LEAST_SHARE = 0.7
"""Requests that spend this much of their time before the first token are prefill work."""

TELL_ESTIMATES = "restart the server with --enable-mfu-metrics (0 means off)"

FIT_MOST_ERROR_SHARE = 0.2
"""A model whose median error is a fifth can't tell a half of a step from a third."""


def step_signs(window: Window) -> dict[str, Sign]:
    """Read them from the window."""
    return {
        **_measured_signs(window),
        **_modelled_signs(window),
        **_fitted_signs(window),
        **_skipping_signs(window),
    }


def _measured_signs(window: Window) -> dict[str, Sign]:
    return {
        "flops": _of_peak(
            "flops_of_peak",
            window.flops_share,
            window.peak_flops_per_s,
            FLOPS,
            "arithmetic keeps the device busy",
            TELL_ESTIMATES,
        ),
        "traffic": _of_peak(
            "memory_traffic_of_peak",
            traffic_share(window),
            window.peak_bytes_per_s,
            READ_BYTES,
            "memory traffic keeps the device busy",
            # The estimate is there, and no use without the bytes of what is skipped.
            NAME_CHECKPOINT if window.kv_read_share < 1 else TELL_ESTIMATES,
        ),
        "prefill": make_sign(
            "prefill_time_share",
            window.prefill_share,
            PREFILL_LEAST_SHARE,
            PREFILL_S,
            "requests spend their time in prefill",
            "measure until requests finish",
        ),
    }


def _skipping_signs(window: Window) -> dict[str, Sign]:
    if PAGES_SEEN not in window.counters:
        return {}
    skipping = make_sign(
        "kv_pages_read_share",
        window.kv_read_share,
        1.0,
        f"{PAGES_READ} over {PAGES_SEEN}",
        "kvtune's plugin lets decoding skip a part of the KV, which the rows here allow for",
        "",
        below=True,
    )
    return {"skipping": skipping}


def _modelled_signs(window: Window) -> dict[str, Sign]:
    arithmetic, weight_reads, kv_reads = step_model(window) or (None, None, None)
    return {
        "arithmetic": _modelled(
            "arithmetic", arithmetic, "prefill arithmetic takes most of a step"
        ),
        "weight_reads": _modelled(
            "weight_reads", weight_reads, "reading the weights takes most of a step"
        ),
        "kv_reads": _modelled("kv_reads", kv_reads, "reading KV takes most of a step"),
        "slow_arithmetic": make_sign(
            "modelled_arithmetic_share_if_slow",
            slow_arithmetic_share(window),
            STEP_LEAST_SHARE,
            "model of a step, the lowest flop/byte known",
            "on a device that is slow at arithmetic, computing prompts takes most of a step",
            "",
        ),
        "weight_traffic": make_sign(
            "weight_reads_of_ceiling",
            weight_traffic_share(window),
            PEAK_LEAST_SHARE,
            "bytes of the weights, steps, the device's read ceiling",
            "reading the weights once a step keeps the memory busy",
            MEASURE_CEILINGS if window.peak_bytes_per_s is None else "",
        ),
        "explained": make_sign(
            "modelled_step_of_observed",
            explained_share(window),
            PEAK_LEAST_SHARE,
            "model of a step, the device's ceilings, steps",
            "what an ideal device would need is most of what steps took",
            "",
        ),
    }


def _fitted_signs(window: Window) -> dict[str, Sign]:
    model, fitted = window.step_time, fitted_step(window)
    kv_rate = None
    if model is not None and model.kv_bytes_per_s is not None and window.peak_bytes_per_s:
        kv_rate = model.kv_bytes_per_s.estimate / window.peak_bytes_per_s
    return {
        "fit_error": make_sign(
            "step_time_model_error",
            None if model is None else model.error_share,
            FIT_MOST_ERROR_SHARE,
            "step-time model",
            "the model of a decode step misses the steps that it was fitted to",
            PROBE,
        ),
        "misfit": make_sign(
            "step_time_predicted_over_observed",
            predicted_ratio(window),
            MISFIT_MOST_RATIO,
            "step-time model, token counters",
            "the model of a decode step was fitted to other steps than these, so it is left aside",
            "" if model is None else "needs finished requests",
            unit="times",
        ),
        "fitted_kv": _fitted(
            "kv",
            None if fitted is None else fitted.kv,
            f"reading KV takes most of a step{_bounds(fitted)}",
        ),
        "fitted_weights": _fitted(
            "weight_reads",
            None if fitted is None else fitted.weights,
            "reading the weights takes most of a step",
            # Where the fixed part is known and not divided, a ceiling is what is missing.
            MEASURE_CEILINGS if fitted is not None else "",
        ),
        "fitted_overhead": _fitted(
            "overhead",
            None if fitted is None else fitted.overhead,
            "launching and scheduling take most of a step",
        ),
        "fitted_compute": _fitted(
            "compute",
            None if fitted is None else fitted.compute,
            "the arithmetic of tokens takes most of a step",
        ),
        "fitted_fixed": _fitted(
            "fixed",
            None if fitted is None else fitted.fixed,
            "what every step pays, however little is in it, takes most of a step",
        ),
        "fitted_kv_rate": make_sign(
            "kv_read_rate_of_ceiling",
            kv_rate,
            PEAK_LEAST_SHARE,
            "step-time model, the device's read ceiling",
            "KV is read about as fast as the memory allows",
            "",
        ),
    }


def _bounds(fitted: FittedStep | None) -> str:
    if fitted is None or fitted.kv_low is None or fitted.kv_high is None:
        return ""
    return f" (between {fitted.kv_low:.0%} and {fitted.kv_high:.0%})"


def _fitted(what: str, value: float | None, says: str, fix: str = "") -> Sign:
    source = "step-time model, token counters"
    return make_sign(f"fitted_{what}_share", value, STEP_LEAST_SHARE, source, says, fix)


def _of_peak(
    metric: str, value: float | None, peak: float | None, series: str, says: str, fix: str
) -> Sign:
    source = f"{series}, the device's peak"
    if value is not None and value > PEAK_MOST_SHARE:
        evidence = Evidence(
            metric=metric,
            value=value,
            threshold=PEAK_LEAST_SHARE,
            unit="share",
            source=source,
            holds=None,
            says="more than the device's peak, so the peak is wrong",
        )
        return Sign(evidence, "the device's peak does not fit the run, so this row says nothing")
    if peak is None:
        return make_sign(metric, value, PEAK_LEAST_SHARE, source, says, MEASURE_CEILINGS)
    return make_sign(metric, value, PEAK_LEAST_SHARE, source, says, fix)


def _modelled(what: str, value: float | None, says: str) -> Sign:
    fix = f"needs finished requests, and the bytes of weights and KV: {NAME_CHECKPOINT}"
    source = "model of a step from token counters and bytes"
    return make_sign(f"modelled_{what}_share", value, STEP_LEAST_SHARE, source, says, fix)
