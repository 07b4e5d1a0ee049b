"""Keys and values of KV heads that hold the same number of tokens, with their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.engines.reference.rope import Rope
from kvtune.policies.plane import Piece, Plane


class HeadGroup:
    """Two planes and the positions of what they hold.

    With a `rope`, keys are stored before the rotation. Positions [1 or H, n] are stored (int32)
    once tokens may be missing in the middle; until then they count up from the first.
    """

    def __init__(self, keys: Plane, values: Plane, rope: Rope | None, tracks: bool) -> None:
        self.keys = keys
        self.values = values
        self.rope = rope
        self.tracks = tracks
        self.first = 0
        self.stored: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens held for each head."""
        return self.keys.tokens

    @property
    def plane_bytes(self) -> int:
        """Bytes that reading both planes touches."""
        return sum(plane.nbytes + plane.borrowed_bytes for plane in (self.keys, self.values))

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add [H, n, d] keys (after RoPE) and values at positions [1 or H, n]."""
        if not self.tokens:
            self.first = int(positions[0, 0])
        self._add_positions(positions)
        if self.rope is not None:
            keys = self.rope.unrotate(keys, positions)
        self.keys.append(keys)
        self.values.append(values)

    def adopt(self, keys: Piece, values: Piece, first: int) -> None:
        """Add tokens that another group of this kind shared, at positions from `first` on."""
        at = torch.arange(first, first + keys.tokens, device=keys.device)[None]
        if not self.tokens:
            self.first = first
        self._add_positions(at)
        self.keys.adopt(keys)
        self.values.adopt(values)

    def read(self, *, compact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys (after RoPE), values [H, n, d] and positions [1 or H, n].

        With `compact`, keys are rotated to 0..n-1, and those are the positions.
        """
        return self.read_keys(compact=compact), self.values.read(), self._read_at(compact)

    def read_keys(self, *, compact: bool = False) -> Tensor:
        """The keys that `read` returns."""
        keys = self.keys.read()
        return keys if self.rope is None else self.rope.rotate(keys, self._read_at(compact))

    def ranks(self) -> Tensor:
        """0..n-1 as positions [1, n]."""
        return torch.arange(self.tokens, device=self._device()).unsqueeze(0)

    def select(self, index: Tensor, *, compact: bool = False) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return keys, values, positions at `index` [H, m] and the bytes of planes touched."""
        keys, key_bytes = self.keys.select(index)
        values, value_bytes = self.values.select(index)
        held_at = self._read_at(compact).expand(len(index), -1).gather(1, index)
        if self.rope is not None:
            keys = self.rope.rotate(keys, held_at)
        return keys, values, held_at, key_bytes + value_bytes

    def keep(self, index: Tensor) -> None:
        """Hold only the tokens at `index` [1 or H, m], ascending."""
        if self.stored is not None:
            wide = index.expand(max(len(index), len(self.stored)), -1)
            self.stored = self.stored.expand(len(wide), -1).gather(1, wide)
        else:
            # Without stored positions only the oldest tokens are ever dropped (windows).
            self.first += int(index[0, 0])
        self.keys.keep(index)
        self.values.keep(index)

    def positions(self, plane: Plane) -> Tensor:
        """Positions [1 or H, n] of what a plane holds."""
        if self.stored is not None:
            return self.stored.long()
        return torch.arange(self.first, self.first + plane.tokens, device=self._device())[None]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor owned, by name."""
        found = {f"keys.{name}": tensor for name, tensor in self.keys.tensors().items()}
        found |= {f"values.{name}": tensor for name, tensor in self.values.tensors().items()}
        if self.stored is not None:
            found["positions"] = self.stored
        return found

    def _read_at(self, compact: bool) -> Tensor:
        return self.ranks() if compact else self.positions(self.keys)

    def _add_positions(self, positions: Tensor) -> None:
        contiguous = self.first + self.tokens
        expected = torch.arange(
            contiguous, contiguous + positions.shape[1], device=positions.device
        )
        gaps = not bool((positions == expected).all())
        if self.stored is None and not self.tracks and not gaps:
            return
        if self.stored is None and self.tokens:
            self.stored = self.positions(self.keys).to(torch.int32)
        new = positions.to(torch.int32)
        if self.stored is None:
            self.stored = new
            return
        rows = max(len(self.stored), len(new))
        self.stored = torch.cat((self.stored.expand(rows, -1), new.expand(rows, -1)), dim=1)

    def _device(self) -> torch.device:
        held = next(iter(self.keys.tensors().values()), None)
        return torch.device("cpu") if held is None else held.device
