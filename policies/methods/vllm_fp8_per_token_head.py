"""vLLM's fp8 cache with one scale for each (token, KV head)."""

from __future__ import annotations

from kvtune.policies.method import REFERENCE, Serving
from kvtune.policies.token_formats import TokenHeadMethod
from kvtune.types import Harm


class VllmFp8PerTokenHead(TokenHeadMethod):
    """fp8 (e4m3) with scale = absmax / 448 of each vector, so that nothing saturates.

    vLLM 0.32 serves it by its Triton backend, on CUDA from compute capability 8.9 on. On a CPU it
    takes the option without a word, and turns prompts longer than one block to garbage.
    """

    name = "vllm-fp8-per-token-head"
    title = "vLLM fp8, a scale per token and head"
    harm = Harm.NEAR_LOSSLESS
    serving = (
        REFERENCE,
        Serving("vllm", "--kv-cache-dtype fp8_per_token_head", "0.32", ("cuda",)),
    )
    summary = (
        "Holds keys and values in 8-bit floats scaled by token: half the bytes, at 3 mantissa bits."
    )
    fmt = "fp8"
