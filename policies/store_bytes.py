"""How many bytes a token takes in a store of kvtune's plugin.

The formulas of docs/plugin.md, which the plugin's own cells and pages add up to: codes, and a scale
(`int8` and `int4`, float32), a norm (`turboquant`, float16) or ranges (`kivi`: a float16 scale and
minimum for 32 tokens of a key's channel, and for 32 channels of a value).
"""

from __future__ import annotations

from kvtune.kernels.packing import packed_bytes
from kvtune.policies.plugin_config import StoreConfig

SCALE_BYTES, NORM_BYTES, RANGE_BYTES = 4, 2, 4
GROUP = 32
_BITS = {"int8": 8, "int4": 4}


def cell_bytes(store: StoreConfig, head_dim: int) -> int:
    """Bytes of one token's key and value in one KV head of `head_dim` channels.

    Pages hold whole groups of tokens. What a page of `kivi` takes beyond whole cells counts as one.
    """
    if (bits := _BITS.get(store.format)) is not None:
        return 2 * (packed_bytes(head_dim, bits) + SCALE_BYTES)
    codes = packed_bytes(head_dim, store.bits_key) + packed_bytes(head_dim, store.bits_value)
    if store.format == "turboquant":
        return codes + 2 * NORM_BYTES
    keys = -(-head_dim * RANGE_BYTES // GROUP)
    return codes + keys + -(-head_dim // GROUP) * RANGE_BYTES
