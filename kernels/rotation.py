"""Seeded orthogonal rotations that spread a vector evenly over its channels.

After a random rotation, each channel of a unit vector follows one known distribution, so that one
fixed codebook fits every vector (TurboQuant, 2504.19874).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvtune.kernels.hadamard import hadamard_transform, random_signs

RotationKind = Literal["haar", "hadamard", "plain"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal map of R^dim that its four fields define on every machine.

    Attributes:
        kind: `haar` is a dense matrix, uniform over all rotations and reflections (QR of a
            Gaussian). `hadamard` is H·D_rounds ... H·D_1 with random signs D, in dim·log2(dim)
            additions a round. `plain` is one Hadamard transform without signs, as vLLM's
            TurboQuant has it: vectors along one of its rows are not spread at all.
        dim: channels of a vector.
        rounds: of `hadamard`, at least 1. One round maps a unit vector e_i to equal magnitudes,
            which no codebook for Gaussians fits; two rounds spread it like `haar`.
        seed: of the signs or the Gaussian; drawn on the CPU.

    A `hadamard` whose `dim` is no power of two is carried out as `haar` (see `carried_out_as`):
    transforming blocks would leave each block's energy where it is.

    Raises:
        ValueError: `kind` is unknown, `dim` or `rounds` is below 1, or a `plain` one's `dim` is no
            power of two.
    """

    kind: RotationKind
    dim: int
    rounds: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("haar", "hadamard", "plain"):
            raise ValueError(f"kind must be haar, hadamard or plain but is {self.kind!r}")
        if self.dim < 1:
            raise ValueError(f"dim must be at least 1 but got {self.dim}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1 but got {self.rounds}")
        if self.kind == "plain" and not self._is_power_of_two:
            raise ValueError(f"a plain rotation needs a power of two but dim is {self.dim}")

    @property
    def carried_out_as(self) -> RotationKind:
        """The kind that really runs: `haar` for a `hadamard` without a power of two."""
        if self.kind == "hadamard" and not self._is_power_of_two:
            return "haar"
        return self.kind

    def rotate(self, x: Tensor) -> Tensor:
        """Return the rotated vectors.

        Args:
            x: (..., dim).

        Returns:
            (..., dim) float32, or float64 for float64 input.

        Raises:
            ValueError: the last dimension is not `dim`.
        """
        x = self._widened(x)
        if self.carried_out_as == "haar":
            return x @ self._haar(x).T
        if self.kind == "plain":
            return self._normalised_hadamard(x)
        for signs in self._signs(x):
            x = self._normalised_hadamard(x * signs)
        return x

    def unrotate(self, x: Tensor) -> Tensor:
        """Undo `rotate`; arguments, result and errors are the same."""
        x = self._widened(x)
        if self.carried_out_as == "haar":
            return x @ self._haar(x)
        if self.kind == "plain":
            return self._normalised_hadamard(x)
        for signs in self._signs(x).flip(0):
            x = self._normalised_hadamard(x) * signs
        return x

    def table(self, device: torch.device) -> Tensor:
        """Return the float32 tensor that it is carried out with, one for all equal rotations.

        Signs (rounds, dim) of a `hadamard`, a matrix (dim, dim) of a `haar`, (0,) for `plain`.
        """
        like = torch.empty(0, device=device)
        if self.carried_out_as == "haar":
            return self._haar(like)
        return like if self.kind == "plain" else self._signs(like)

    @property
    def _is_power_of_two(self) -> bool:
        return self.dim & (self.dim - 1) == 0

    def _widened(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"this rotation turns {self.dim} channels but got {x.shape[-1]}")
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def _normalised_hadamard(self, x: Tensor) -> Tensor:
        return hadamard_transform(x) * (1.0 / math.sqrt(self.dim))

    def _haar(self, like: Tensor) -> Tensor:
        return _haar_matrix(self.dim, self.seed, like.dtype, like.device)

    def _signs(self, like: Tensor) -> Tensor:
        return _round_signs(self.dim, self.rounds, self.seed, like.dtype, like.device)


@lru_cache(maxsize=64)
def _round_signs(
    dim: int, rounds: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return (rounds, dim) of ±1; round 1 is the same for every number of rounds."""
    generator = torch.Generator().manual_seed(seed)
    rows = [random_signs(dim, generator) for _ in range(rounds)]
    return torch.stack(rows).to(device, dtype)


@lru_cache(maxsize=64)
def _haar_matrix(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the signs of R's diagonal open; fixing them makes Q uniform (Mezzadri, 2007).
    matrix: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return matrix.to(device, dtype)
