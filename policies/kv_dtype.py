"""In which format keys and values are stored.

The engine is no judge of this: vLLM 0.32 on a CPU accepts every format, and all but a few corrupt
prompts longer than one block while short ones look perfect. So each platform has its list here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.kernels.device import DeviceDetail
from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.model_shape import ModelShape
from kvtune.types import Choice, Device, EngineInfo, Harm

KNOB = "kv_cache_dtype"
OFFERED = ("fp8", "fp8_e5m2")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc")
OFFERED_LOSSY = (*PER_TOKEN_HEAD[:2], TURBOQUANT[0], PER_TOKEN_HEAD[2], TURBOQUANT[1])
"""Formats that a search tries only if it may be lossy, those of more bits first.

They are served on CUDA alone, so what they lose on a server was not measured by kvtune yet.
"""

CPU_GARBAGE = "starts on a CPU without a word and turns prompts longer than one block to garbage"
CPU_SAME_PATH = "takes the same wrong path on a CPU as the formats that turn prompts to garbage"
UNMEASURED = "has a loss that kvtune has not measured, and runs on few GPUs"
TOO_LOSSY = "raises perplexity by {} by vLLM's own figures, which no limit on answers allows"
SIXTEEN_BITS = "takes the same bytes as a 16-bit model's own format"
MLA_ONLY = "is for DeepSeek's latent attention only"

REFUSED: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "bfloat16": SIXTEEN_BITS + ", and is garbage under a float32 model on a CPU",
        "float16": SIXTEEN_BITS,
        "fp8_inc": CPU_GARBAGE,
        "fp8_ds_mla": CPU_SAME_PATH,
        "nvfp4_ds_mla": CPU_SAME_PATH,
        "turboquant_k8v4": CPU_SAME_PATH,
        "turboquant_4bit_nc": CPU_GARBAGE,
        "turboquant_k3v4_nc": CPU_SAME_PATH,
        "turboquant_3bit_nc": CPU_SAME_PATH,
        "ultraquant_4bit": CPU_SAME_PATH,
        "int4_per_token_head": CPU_GARBAGE,
        "int8_per_token_head": CPU_GARBAGE,
        "fp8_per_token_head": CPU_GARBAGE,
        "nvfp4": CPU_GARBAGE,
        "nvfp4_4over6": CPU_SAME_PATH,
    },
    "cuda": {
        "bfloat16": SIXTEEN_BITS,
        "float16": SIXTEEN_BITS,
        "fp8_inc": "is for Intel Gaudi only",
        "fp8_ds_mla": MLA_ONLY,
        "nvfp4_ds_mla": MLA_ONLY,
        "turboquant_k3v4_nc": TOO_LOSSY.format("11%"),
        "turboquant_3bit_nc": TOO_LOSSY.format("21%"),
        "ultraquant_4bit": "is made for AMD's gfx950",
        "nvfp4": UNMEASURED,
        "nvfp4_4over6": UNMEASURED,
    },
}
"""Why a format is not offered, by platform. What is named nowhere here is unknown."""

CAPABILITIES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(FP8, (8, 0)),
    "fp8_per_token_head": (8, 9),
}
"""The lowest CUDA compute capability of a backend that takes a format (FLASHINFER, TRITON_ATTN).

The other formats run wherever Triton does."""


def kv_dtype_support(
    dtype: str,
    engine: EngineInfo,
    device: Device,
    model: ModelShape | None,
    detail: DeviceDetail | None = None,
) -> Support:
    """Say whether `--kv-cache-dtype dtype` gives right answers here and is offered.

    What is unknown about the device or the model does not refuse a format: the engine itself
    refuses that loudly at start, and a trial that fails to start is never chosen.
    """
    platform = engine.platform if engine.platform in REFUSED else device.kind
    if dtype == "auto":
        return Support.yes()
    if dtype in REFUSED[platform]:
        return Support.no(f"{dtype} {REFUSED[platform][dtype]}")
    if dtype not in (*FP8, *OFFERED_LOSSY):
        return Support.no(f"{dtype} is not a format that kvtune knows")
    if platform == "cpu":
        return _fp8_on_cpu(model, detail)
    capability = detail.compute_capability if detail else None
    needed = CAPABILITIES.get(dtype)
    if capability is not None and needed is not None and capability < needed:
        return Support.no(
            f"{dtype} KV needs compute capability {needed[0]}.{needed[1]}, this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    return Support.yes()


def _fp8_on_cpu(model: ModelShape | None, detail: DeviceDetail | None) -> Support:
    flags = detail.cpu_flags if detail else frozenset()
    if flags and not flags & {"avx512f", "amx_tile"}:
        return Support.no("fp8 KV on a CPU needs AVX-512 or AMX, which this one lacks")
    if model is not None and model.head_dim % 32:
        return Support.no(
            f"fp8 KV on a CPU needs a head size that is a multiple of 32, not {model.head_dim}"
        )
    return Support.yes()


class KvDtype(Policy):
    """Store keys and values in 8 bits, or on a GPU in 4: more tokens in the same memory."""

    name: ClassVar[str] = "kv_dtype"
    title: ClassVar[str] = "storage format of keys and values"
    harm: ClassVar[Harm] = Harm.NEAR_LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = ("kv-cache-dtype",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where no smaller format is right."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if ctx.platform == "cpu" and ctx.fixed("kv-transfer-config"):
            return Support.no("fp8 KV does not go with a KV connector on a CPU")
        return Support.yes() if _offered(ctx) else _support(OFFERED[0], ctx)

    def harm_of(self, parameters: Mapping[str, JsonValue]) -> Harm:
        """Formats other than fp8 are lossy until servers have shown what they lose."""
        return Harm.LOSSY if parameters.get(KNOB) in OFFERED_LOSSY else self.harm

    def relieves(self, ctx: Context) -> frozenset[str]:
        """Fewer bytes are held and read; whether that is faster on a CPU only trials tell."""
        return frozenset({"capacity", "bandwidth"})

    def refused_values(self, ctx: Context) -> dict[str, str]:
        """Name every format that is left out."""
        offered = {dtype: _support(dtype, ctx) for dtype in _names(ctx)}
        refused = {dtype: support.reason for dtype, support in offered.items() if not support.ok}
        reasons = {**REFUSED[ctx.platform], **refused}
        return {f"{KNOB}={dtype}": reason for dtype, reason in reasons.items()}

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer the formats that are right here."""
        offered = _offered(ctx)
        if not offered:
            return ()
        because = (
            "8 bits hold twice the tokens; on a CPU up to a quarter of the speed is lost"
            if ctx.platform == "cpu"
            else "8 bits hold twice the tokens, and half the bytes are read"
        )
        return (Knob.choice(KNOB, ("auto", *offered), default="auto", because=because),)

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `kv-cache-dtype`."""
        values = self.complete(parameters, ctx)
        dtype = values.get(KNOB, "auto")
        if dtype == "auto":
            return self.make_choice(values, {}, "keys and values in the model's own format")
        loss = "lossy" if dtype in OFFERED_LOSSY else "nearly lossless"
        more = "twice the" if dtype in OFFERED else "more"
        because = f"{dtype} keys and values: {more} tokens in the same memory, {loss}"
        return self.make_choice(values, {"kv-cache-dtype": dtype}, because)


def _support(dtype: str, ctx: Context) -> Support:
    return kv_dtype_support(dtype, ctx.engine, ctx.device, ctx.model, ctx.detail)


def _offered(ctx: Context) -> tuple[str, ...]:
    return tuple(dtype for dtype in _names(ctx) if _support(dtype, ctx).ok)


def _names(ctx: Context) -> tuple[str, ...]:
    """What may be offered on this platform, where device and model allow it."""
    return tuple(one for one in (*OFFERED, *OFFERED_LOSSY) if one not in REFUSED[ctx.platform])
