"""vLLM's int4 cache with one scale for each (token, KV head)."""

from __future__ import annotations

from kvtune.policies.method import REFERENCE, Serving
from kvtune.policies.token_formats import TokenHeadMethod
from kvtune.types import Harm


class VllmInt4PerTokenHead(TokenHeadMethod):
    """Asymmetric int4 of each vector after a Hadamard transform with fixed signs.

    The zero point lies in the low four bits of the scale. One round of signs leaves unit vectors
    flat, and the zero point is clamped to the codes. vLLM 0.32 serves it by its Triton backend, on
    CUDA. On a CPU it takes the option without a word, and turns prompts longer than one block to
    garbage.
    """

    name = "vllm-int4-per-token-head"
    title = "vLLM int4, a scale per token and head"
    harm = Harm.LOSSY
    serving = (
        REFERENCE,
        Serving("vllm", "--kv-cache-dtype int4_per_token_head", "0.32", ("cuda",)),
        Serving(
            "kvtune-plugin",
            "vLLM 0.32, --additional-config.kvtune.store.format int4",
            platforms=("cpu",),
        ),
    )
    summary = "Holds keys and values in 4 bits after a rotation: a quarter of the bytes, with loss."
    fmt = "int4"
