"""The rotation of a model's own keys, taken off and put on again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.errors import BadInput
from kvtune.kernels.rope import apply_rope, cos_sin, rerotate, unapply_rope


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE with a model's inverse frequencies [d_rot / 2].

    A factor that the model multiplies rotated vectors with stays on them throughout: rotation and
    scaling commute.
    """

    inv_freq: Tensor

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Put the rotation on [H, n, d] at positions [n] or [H, n]."""
        cos, sin = cos_sin(self.inv_freq, positions)
        return apply_rope(x, cos, sin)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Take the rotation off."""
        cos, sin = cos_sin(self.inv_freq, positions)
        return unapply_rope(x, cos, sin)

    def move(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Rotate from positions `before` to `after`."""
        return rerotate(x, self.inv_freq, after - before)


def model_ropes(model: Any, layer_kinds: tuple[str, ...]) -> tuple[Rope, ...]:
    """The rotation of each layer of a transformers model.

    Raises:
        BadInput: its frequencies change with the length of the sequence.
    """
    rotary = model.model.rotary_emb
    kind = getattr(rotary, "rope_type", "default")
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    moving = kinds & {"dynamic", "longrope"}
    if moving:
        raise BadInput(
            f"this model's RoPE ({', '.join(sorted(moving))}) changes with the sequence's length",
            fix="the reference engine runs models with fixed frequencies",
        )
    ropes = []
    for layer_kind in layer_kinds:
        found = getattr(rotary, f"{layer_kind}_inv_freq", None)
        inv_freq = rotary.inv_freq if found is None else found
        ropes.append(Rope(inv_freq.detach().to(torch.float32)))
    return tuple(ropes)
