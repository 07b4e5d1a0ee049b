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
from kvtune.types import Bottleneck, Choice, Device, EngineInfo, Harm

KNOB = "kv_cache_dtype"
OFFERED = ("fp8", "fp8_e5m2")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")

CPU_GARBAGE = "starts on a CPU without a word and turns prompts longer than one block to garbage"
CPU_SAME_PATH = "takes the same wrong path on a CPU as the formats that turn prompts to garbage"
UNMEASURED = "has a loss that kvtune has not measured; only fp8 is offered yet"
TURBOQUANT = "raises perplexity by 1% to 21% by vLLM's own figures; only fp8 is offered yet"
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
        "turboquant_k8v4": TURBOQUANT,
        "turboquant_4bit_nc": TURBOQUANT,
        "turboquant_k3v4_nc": TURBOQUANT,
        "turboquant_3bit_nc": TURBOQUANT,
        "ultraquant_4bit": "is made for AMD's gfx950",
        "int4_per_token_head": UNMEASURED,
        "int8_per_token_head": UNMEASURED,
        "fp8_per_token_head": UNMEASURED,
        "nvfp4": UNMEASURED,
        "nvfp4_4over6": UNMEASURED,
    },
}
"""Why a format is not offered, by platform. What is not named here or in `FP8` is unknown."""

FP8_CAPABILITY = (8, 0)
"""The lowest CUDA compute capability of a backend that takes fp8 KV (FLASHINFER)."""

UNHELPED = (
    Bottleneck.COMPUTE,
    Bottleneck.BATCH_WIDTH,
    Bottleneck.OVERHEAD,
    Bottleneck.WEIGHT_BANDWIDTH,
    Bottleneck.IDLE,
)


def kv_dtype_support(
    dtype: str,
    engine: EngineInfo,
    device: Device,
    model: ModelShape | None,
    detail: DeviceDetail | None = None,
) -> Support:
    """Say whether `--kv-cache-dtype dtype` gives right answers here and is offered.

    What is unknown about the device or the model does not refuse fp8: the engine itself refuses
    that loudly at start, and a trial that fails to start is never chosen.
    """
    platform = engine.platform if engine.platform in REFUSED else device.kind
    if dtype == "auto":
        return Support.yes()
    if dtype in REFUSED[platform]:
        return Support.no(f"{dtype} {REFUSED[platform][dtype]}")
    if dtype not in FP8:
        return Support.no(f"{dtype} is not a format that kvtune knows")
    if platform == "cpu":
        return _fp8_on_cpu(model, detail)
    capability = detail.compute_capability if detail else None
    if capability is not None and capability < FP8_CAPABILITY:
        return Support.no(
            f"fp8 KV needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
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
    """Store keys and values in 8 bits: twice the tokens in the same memory."""

    name: ClassVar[str] = "kv_dtype"
    title: ClassVar[str] = "storage format of keys and values"
    harm: ClassVar[Harm] = Harm.NEAR_LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = ("kv-cache-dtype",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where no 8-bit format is right, or where a smaller KV cannot help."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if ctx.platform == "cpu" and ctx.fixed("kv-transfer-config"):
            return Support.no("fp8 KV does not go with a KV connector on a CPU")
        verdict = ctx.verdict
        if verdict and verdict.confidence == "high" and verdict.bottleneck in UNHELPED:
            return Support.no(
                f"the workload is bound by {verdict.bottleneck.value}, not by the KV cache"
            )
        return Support.yes() if _offered(ctx) else _support(OFFERED[0], ctx)

    def refused_values(self, ctx: Context) -> dict[str, str]:
        """Name every format that is left out."""
        offered = {dtype: _support(dtype, ctx) for dtype in OFFERED}
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
        because = f"{dtype} keys and values: twice the tokens in the same memory, nearly lossless"
        return self.make_choice(values, {"kv-cache-dtype": dtype}, because)


def _support(dtype: str, ctx: Context) -> Support:
    return kv_dtype_support(dtype, ctx.engine, ctx.device, ctx.model, ctx.detail)


def _offered(ctx: Context) -> tuple[str, ...]:
    return tuple(dtype for dtype in OFFERED if _support(dtype, ctx).ok)
