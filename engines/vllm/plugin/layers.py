"""Layers that no policy can serve right, by what only a layer knows of itself."""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.asked import telling_fixes
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig


def checked(stock: type, asked: PluginConfig) -> type:
    """`stock`, an `AttentionImpl`, that is not made for a layer that would be served wrong."""

    class Impl(stock):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            with telling_fixes():
                _check(self, asked)

    return Impl


def _check(impl: Any, asked: PluginConfig) -> None:
    """Refuse a layer that attends in another way than by the scores of its own tokens.

    Raises:
        BadInput: it says why.
    """
    why, part = None, "kvtune's section"
    if impl.attn_type != "decoder":
        why = f"attends as {impl.attn_type}"
    elif impl.kv_sharing_target_layer_name is not None:
        why = "reads the KV cache of another layer"
    elif impl.alibi_slopes is not None:
        why = "weighs keys by their distance (ALiBi), which pages that are left out would shorten"
    elif impl.sinks is not None:
        why = "has attention sinks of its own, which were never tried"
    elif impl.logits_soft_cap and asked.store is not None:
        why, part = "squashes its scores (soft cap)", "store"
    if why is not None:
        raise BadInput(
            f"kvtune's plugin cannot serve a layer that {why}",
            fix=f"take {part} out of --additional-config for this model",
        )
