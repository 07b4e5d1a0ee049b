"""What if a model had fewer KV heads: the average of each group's projections."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.reference.families import FAMILIES
from kvtune.errors import BadInput

POOLED = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def pool_kv_heads(weight: Tensor, before: int, after: int) -> Tensor:
    """Average the rows of each group of heads.

    Args:
        weight: (before * d, ...) a projection to keys or values, or its bias.
        before: KV heads that it projects to.
        after: KV heads wanted; neighbours are pooled.

    Returns:
        (after * d, ...) in the weight's dtype.

    Raises:
        BadInput: `after` does not divide `before`.
    """
    if after < 1 or before % after:
        raise BadInput(
            f"{before} KV heads do not pool into {after}", fix=f"give a divisor of {before}"
        )
    rest = weight.shape[1:]
    grouped = weight.reshape(after, before // after, -1, *rest)
    return grouped.float().mean(dim=1).flatten(0, 1).to(weight.dtype)


@torch.no_grad()
def pooled_model(model: Any, kv_heads: int) -> Any:
    """A new model with `kv_heads` KV heads, each the mean of a group of the given one's.

    This is how GQA starts (2305.13245), before it trains on; without that training it only shows
    how much a model would lose. It is no policy and is never offered as one. Averaging keys is
    legal under RoPE, which turns all heads alike.

    Args:
        model: a transformers model of a family that the reference engine runs.
        kv_heads: a divisor of its KV heads.

    Raises:
        BadInput: another family, or heads that do not divide.
    """
    if model.config.model_type not in FAMILIES:
        raise BadInput(
            f"{model.config.model_type!r} models are not pooled",
            fix="give one of: " + ", ".join(FAMILIES),
        )
    config = copy.deepcopy(model.config)
    before = config.num_key_value_heads
    state = {
        name: pool_kv_heads(weight, before, kv_heads) if name.endswith(POOLED) else weight
        for name, weight in model.state_dict().items()
    }
    config.num_key_value_heads = kv_heads
    pooled = type(model)(config).to(model.dtype)
    pooled.load_state_dict(state)
    return pooled.to(model.device).eval()
