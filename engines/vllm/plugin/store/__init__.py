"""Quantized KV caches in vLLM: pages that hold keys and values in fewer bits.

- `attend`: attention to pages that are read back to full precision. Torch alone.
- `cells`, `by_token`: formats that store each token by itself, and their layers.
- `grouped`, `open_pages`, `by_page`: KIVI, which needs whole pages of tokens.
- `spec`: how large pages are; `layers`: which layers cannot have them.
"""

from __future__ import annotations

from kvtune.policies.plugin_config import StoreConfig


def wrapped(impl: type, builder: type, asked: StoreConfig) -> tuple[type, type]:
    """The stock `AttentionImpl` and `AttentionMetadataBuilder` over pages as `asked` for."""
    from kvtune.engines.vllm.plugin.store import by_page, by_token

    if asked.is_grouped:
        return by_page.impl_class(impl, asked), by_page.builder_class(builder)
    return by_token.impl_class(impl, asked), builder
