"""What test servers run with on the processor at hand.

One without AVX-512 has no instructions for bfloat16 and takes several times as long for it as for
float32, in which keys and values have twice the bytes.
"""

import pytest

from kvtune.kernels.device import cpu_flags

HAS_AVX512 = "avx512f" in cpu_flags()
DTYPE = "bfloat16" if HAS_AVX512 else "float32"
KV_WIDTH = 1 if HAS_AVX512 else 2
"""Bytes of a number in the cache, relative to bfloat16."""

needs_avx512 = pytest.mark.skipif(
    not HAS_AVX512, reason="this CPU has no AVX-512: no fp8, and too slow for the goals of the test"
)


def kv_mib(bfloat16_mib):
    """Memory for as many tokens as fit into so many MiB in bfloat16."""
    return f"{bfloat16_mib * KV_WIDTH}M"


def eager(kv_memory_mib, **more):
    """Arguments of a small server that starts fast."""
    dtype = {} if HAS_AVX512 else {"dtype": DTYPE}
    sizes = {"kv-cache-memory-bytes": kv_mib(kv_memory_mib), "max-model-len": 2048}
    return {"enforce-eager": True, **dtype, **sizes, **more}


def as_words(arguments):
    """The same as on a command line."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in arguments.items()
    )
