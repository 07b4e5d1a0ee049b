"""Directions between directions: spherical interpolation of unit vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_ANGLE = 1e-4
"""Radians from equal or opposite directions within which the arc is taken for its chord."""


def angle(u: Tensor, w: Tensor) -> Tensor:
    """The angle in radians between unit vectors [..., D], precise also where it is small."""
    return 2 * torch.atan2((u - w).norm(dim=-1), (u + w).norm(dim=-1))


def slerp(u: Tensor, w: Tensor, t: float) -> Tensor:
    """The unit vector on the arc from u (t = 0) to w (t = 1), [..., D]; either may be zero."""
    omega = angle(u, w).unsqueeze(-1)
    straight = (omega < SMALLEST_ANGLE) | (omega > math.pi - SMALLEST_ANGLE)
    sine = torch.where(straight, 1.0, omega.sin())
    below = torch.where(straight, 1 - t, ((1 - t) * omega).sin() / sine)
    above = torch.where(straight, t, (t * omega).sin() / sine)
    return unit(below * u + above * w)


def unit(x: Tensor) -> Tensor:
    """Vectors [..., D] at length 1; zeros stay zeros."""
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)
