"""vLLM's int8 cache with one scale for each (token, KV head)."""

from __future__ import annotations

from kvtune.policies.method import REFERENCE, Serving
from kvtune.policies.token_formats import TokenHeadMethod
from kvtune.types import Harm


class VllmInt8PerTokenHead(TokenHeadMethod):
    """Symmetric int8: scale = absmax / 127 of each vector.

    vLLM 0.32 serves it by its Triton backend, on CUDA. On a CPU it takes the option without a
    word, and turns prompts longer than one block to garbage.
    """

    name = "vllm-int8-per-token-head"
    title = "vLLM int8, a scale per token and head"
    harm = Harm.NEAR_LOSSLESS
    serving = (
        REFERENCE,
        Serving("vllm", "--kv-cache-dtype int8_per_token_head", "0.32", ("cuda",)),
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.store.format int8",
            platforms=("cpu",),
        ),
    )
    summary = "Holds keys and values in 8-bit integers: half the bytes, at half a step of error."
    fmt = "int8"
