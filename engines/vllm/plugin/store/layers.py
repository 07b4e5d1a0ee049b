"""Layers that cannot have a store: what only a layer knows."""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.asked import telling_fixes
from kvtune.errors import BadInput


@telling_fixes()
def check(impl: Any) -> None:
    """Refuse a layer that attends to its own tokens in another way than by their scores alone.

    Raises:
        BadInput: it says why.
    """
    why = None
    if impl.attn_type != "decoder":
        why = f"attends as {impl.attn_type}"
    elif impl.kv_sharing_target_layer_name is not None:
        why = "reads the KV cache of another layer"
    elif impl.alibi_slopes is not None:
        why = "weighs keys by their distance (ALiBi)"
    elif impl.logits_soft_cap:
        why = "squashes its scores (soft cap)"
    elif impl.sinks is not None:
        why = "has attention sinks of its own"
    if why is not None:
        raise BadInput(
            f"kvtune's store cannot serve a layer that {why}",
            fix="take store out of kvtune's section of --additional-config for this model",
        )
