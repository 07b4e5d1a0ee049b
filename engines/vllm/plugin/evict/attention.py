"""What a layer does for page eviction: after it attended, it scores what its step asks for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtune.errors import BadInput


def impl_class(stock: type) -> type:
    """`stock`, an `AttentionImpl`, that adds its attention to the scores of its step."""

    class Impl(stock):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            _check(self)

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


def _check(impl: Any) -> None:
    """Refuse a layer whose attention is not what the scores take it for.

    Raises:
        BadInput: it says why.
    """
    why = None
    if impl.alibi_slopes is not None:
        why = "weighs keys by their distance (ALiBi)"
    elif impl.sinks is not None:
        why = "has attention sinks of its own"
    if why is not None:
        raise BadInput(
            f"kvtune's page eviction was never tried with a layer that {why}",
            fix="take page_eviction out of kvtune's section of --additional-config",
        )
