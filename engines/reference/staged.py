"""A prompt in full precision, before a layer stores what it keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.policies.plane import gather_tokens


@dataclass(frozen=True, slots=True)
class Staged:
    """Keys, values [H, n, d] and positions [1 or H, n] of a prompt that is not yet stored."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def followed_by(self, later: Staged) -> Staged:
        """This chunk and the next one."""
        return Staged(
            torch.cat((self.keys, later.keys), dim=1),
            torch.cat((self.values, later.values), dim=1),
            torch.cat((self.positions, later.positions), dim=1),
        )

    def head(self, number: int) -> Staged:
        """One KV head by itself."""
        own = slice(number, number + 1)
        return Staged(self.keys[own], self.values[own], self.positions)

    def at(self, index: Tensor) -> Staged:
        """The tokens at `index` [1 or H, m]."""
        return Staged(
            gather_tokens(self.keys, index),
            gather_tokens(self.values, index),
            self.positions.expand(len(index), -1).gather(1, index),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Keys and values by name."""
        return {"keys": self.keys, "values": self.values}
