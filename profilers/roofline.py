"""Where a workload lies under the roofline of its device.

The roofline (Williams et al., CACM 52(4), 2009) bounds arithmetic a second by the device's matrix
rate, and by its memory bandwidth times the operations done on each byte read. A step reads the
weights once and the KV of its sequences, but for what kvtune's plugin skips; what it writes, and
activations, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvtune.policies.model_flops import TokenFlops
from kvtune.profilers.sign import MEASURE_CEILINGS
from kvtune.profilers.step_shares import fitted_step, predicted_ratio
from kvtune.profilers.window import Window

PREFILL_LEAST_SHARE = 0.05
"""Of a mean step; what is less is within the error of the model that it is the rest of."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of one kind does on one device, and how long it takes if that is known.

    `sequences` decode a token each with `context_tokens` of context on average, and `prompt_tokens`
    of prompts are computed.
    """

    kind: Literal["decode", "prefill", "mean step"]
    sequences: float
    context_tokens: float
    prompt_tokens: float
    flop: float
    read_bytes: float
    duration_s: float | None

    @property
    def intensity(self) -> float:
        """Operations on each byte read, in flop/byte."""
        return self.flop / self.read_bytes

    @property
    def flop_per_s(self) -> float | None:
        """Operations a second that are reached."""
        return self.flop / self.duration_s if self.duration_s else None


@dataclass(frozen=True, slots=True)
class Roofline:
    """The ceilings of a device and the work under them.

    Both ceilings are `None` where they were not measured. `missing` says what keeps work, or
    ceilings, from being known.
    """

    read_bytes_per_s: float | None
    matrix_flop_per_s: float | None
    work: tuple[Work, ...]
    missing: tuple[str, ...] = ()

    @property
    def ridge(self) -> float | None:
        """The intensity in flop/byte at which both ceilings meet."""
        if self.read_bytes_per_s is None or self.matrix_flop_per_s is None:
            return None
        return self.matrix_flop_per_s / self.read_bytes_per_s

    def roof_flop_per_s(self, intensity: float) -> float | None:
        """The most operations a second at this intensity."""
        if self.read_bytes_per_s is None or self.matrix_flop_per_s is None:
            return None
        return min(self.matrix_flop_per_s, intensity * self.read_bytes_per_s)

    def reached(self, work: Work) -> float | None:
        """The share of what the roof allows."""
        roof, flop_per_s = self.roof_flop_per_s(work.intensity), work.flop_per_s
        return flop_per_s / roof if roof and flop_per_s is not None else None

    def held_by(self, work: Work) -> str | None:
        """Which ceiling the work is under."""
        if self.ridge is None:
            return None
        return "memory" if work.intensity < self.ridge else "arithmetic"


def roofline(window: Window, flops: TokenFlops | None, devices: int | None) -> Roofline:
    """Place the steps of a window; `flops` are those of its model, on `devices` together."""
    missing = []
    if window.peak_bytes_per_s is None or window.peak_flops_per_s is None:
        missing.append(
            "the device's ceilings: kvtune measures them when it starts the server itself; else "
            + MEASURE_CEILINGS
        )
    if not window.weight_bytes or window.kv_bytes_per_token is None:
        missing.append("the bytes of weights and KV: name the checkpoint's directory with --model")
    elif flops is None or devices is None:
        missing.append("the arithmetic of a token: it does not follow from the model's config")
    if window.kv_tokens_per_step is None:
        missing.append("what a step holds: no request finished")
    return Roofline(
        read_bytes_per_s=window.peak_bytes_per_s,
        matrix_flop_per_s=window.peak_flops_per_s,
        work=() if flops is None or not devices else _work(window, flops, devices),
        missing=tuple(missing),
    )


def _work(window: Window, flops: TokenFlops, devices: int) -> tuple[Work, ...]:
    sequences, kv_tokens = window.sequences_per_step, window.kv_tokens_per_step
    prompt_tokens = window.prompt_tokens_per_request
    weights, kv_bytes = window.weight_bytes, window.kv_bytes_per_token
    if not weights or kv_bytes is None or not sequences or not kv_tokens or not prompt_tokens:
        return ()
    read_tokens = kv_tokens * window.kv_read_share
    decode = Work(
        kind="decode",
        sequences=sequences,
        context_tokens=kv_tokens / sequences,
        prompt_tokens=0.0,
        flop=flops.decode_flop(sequences, read_tokens) / devices,
        read_bytes=weights + read_tokens * kv_bytes,
        duration_s=_decode_s(window),
    )
    found = [decode]
    cached_tokens = (window.prefix_hits or 0.0) * prompt_tokens
    limit = window.effective.max_num_batched_tokens if window.effective is not None else None
    at_once = min(prompt_tokens - cached_tokens, limit or prompt_tokens)
    if at_once >= 1:
        rate = _prefill_tokens_per_s(window)
        found.append(
            Work(
                kind="prefill",
                sequences=0.0,
                context_tokens=0.0,
                prompt_tokens=at_once,
                flop=flops.prefill_flop(at_once, cached_tokens) / devices,
                read_bytes=weights + (cached_tokens + at_once) * kv_bytes,
                duration_s=at_once / rate if rate else None,
            )
        )
    if (mixed_tokens := window.prefill_tokens_per_step) is not None:
        # A prompt token attends to half of what is computed with it, and to all that was cached.
        before_tokens = max(0.0, cached_tokens + prompt_tokens - mixed_tokens) / 2
        flop = flops.prefill_flop(mixed_tokens, before_tokens) / devices
        found.append(
            replace(
                decode,
                kind="mean step",
                prompt_tokens=mixed_tokens,
                flop=decode.flop + flop,
                duration_s=window.mean_step_s,
            )
        )
    return tuple(found)


def _decode_s(window: Window) -> float | None:
    """Seconds of a step that only decodes, by the step-time model if it fits."""
    ratio, step_s = predicted_ratio(window), window.mean_step_s
    if fitted_step(window) is None or ratio is None or step_s is None:
        return None
    return ratio * step_s


def _prefill_tokens_per_s(window: Window) -> float | None:
    """Prompt tokens computed in each second that decoding does not explain."""
    fitted, step_s = fitted_step(window), window.mean_step_s
    tokens = window.prefill_tokens_per_step
    if fitted is None or step_s is None or not tokens or fitted.prefill < PREFILL_LEAST_SHARE:
        return None
    return tokens / (fitted.prefill * step_s)
