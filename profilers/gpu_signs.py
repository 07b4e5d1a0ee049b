"""Signs of what the server's GPUs did, as they measure it themselves.

NVML's GPM (on Hopper and newer) tells more than an engine's estimate of its work: it needs neither
the checkpoint nor measured ceilings.
"""

from __future__ import annotations

from statistics import fmean

from kvtune.profilers.sign import Sign, make_sign
from kvtune.profilers.step_signs import PEAK_LEAST_SHARE, STEP_LEAST_SHARE
from kvtune.profilers.window import Window

BUSY_LEAST_RATIO = 0.05
"""Of the time in which requests run. A GPU that does less does not serve them: even where launching
kernels takes most of a step, some kernel runs more often than that."""

SLOWED_LEAST_SHARE = 0.1
"""Clocks held back for less of the time hardly change a mean step."""

_MEASURED = (
    (
        "gpu_memory",
        "gpu_memory_bandwidth_share",
        "dram_bandwidth_ratio",
        PEAK_LEAST_SHARE,
        "memory traffic keeps the GPU busy",
    ),
    (
        "gpu_tensor",
        "gpu_tensor_share",
        "tensor_ratio",
        PEAK_LEAST_SHARE,
        "matrix arithmetic keeps the GPU busy",
    ),
    ("gpu_sm", "gpu_sm_share", "sm_ratio", STEP_LEAST_SHARE, "the GPU's SMs have work"),
)


def gpu_signs(window: Window) -> dict[str, Sign]:
    """What the server's GPUs did while requests ran; empty where no GPU was seen at work."""
    if (_while_busy(window, "busy_ratio") or 0.0) < BUSY_LEAST_RATIO:
        return {}
    reasons = ", ".join(sorted({why for use in window.gpus for why in use.slowed_by}))
    slowed = fmean(use.slowed_ratio for use in window.gpus)
    says = f"the GPU's clocks are held back{f' by {reasons}' if reasons else ''}"
    return {
        "gpu_slowed": make_sign("gpu_slowed_share", slowed, SLOWED_LEAST_SHARE, "NVML", says, ""),
        **{
            sign: make_sign(name, _while_busy(window, ratio), threshold, "NVML GPM", says, "")
            for sign, name, ratio, threshold, says in _MEASURED
        },
    }


def _while_busy(window: Window, ratio: str) -> float | None:
    """The mean over the GPUs, as if nothing had happened in the time without a request."""
    told = [getattr(use, ratio) for use in window.gpus]
    if not told or None in told or not window.busy_share:
        return None
    return min(1.0, fmean(told) / window.busy_share)
