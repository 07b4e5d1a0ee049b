"""What a layer does for page eviction: after it attended, it scores what its step asks for."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def impl_class(stock: type) -> type:
    """`stock`, an `AttentionImpl`, that adds its attention to the scores of its step."""

    class Impl(stock):  # type: ignore[misc]
        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            **scales: Any,
        ) -> Any:
            attended = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, **scales
            )
            if attn_metadata is not None:
                softcap = self.logits_soft_cap or None
                attn_metadata.eviction.add(query, kv_cache, self.scale, softcap)
            return attended

    return Impl
