"""Running stores of token vectors: what a `StoreMethod` builds and the reference engine fills.

A plane is the keys or the values of one layer of one sequence: [heads, tokens, width]. It owns its
tensors in `held`, and nothing else of any size, so that bytes can be counted and caches moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtune.errors import BadInput
from kvtune.lazy import lazy_import
from kvtune.policies.method import PlaneShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """What a store may ask about.

    `calibration` maps a calibrated method's name to what it learned for this layer and role.
    `sequence` is a dictionary that all planes of one sequence share (for methods that couple
    layers), `engine` one that all sequences of an engine share (for pools and constants).
    `first_head` is which of the layer's KV heads the plane's first one is: heads that keep
    different numbers of tokens have a plane each.
    """

    shape: PlaneShape
    dtype: torch.dtype
    device: torch.device
    calibration: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    sequence: dict[Any, Any] = field(default_factory=dict)
    engine: dict[Any, Any] = field(default_factory=dict)
    first_head: int = 0

    def resized(self, heads: int, width: int) -> PlaneContext:
        """The same context for a plane of another size."""
        return replace(self, shape=self.shape.resized(heads, width))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a plane as they are stored: named tensors [heads, n, ...].

    Another plane of the same format can hold them as they are, without encoding anything again.
    """

    tensors: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return next(iter(self.tensors.values())).shape[1]

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return tensor_bytes(self.tensors)

    def release(self) -> None:
        """Say that nobody will adopt it any more."""


class Plane(ABC):
    """A growing [heads, tokens, width] array of token vectors, held in some format.

    The first `append` on an empty plane is the prompt (or what an eviction kept), later ones are
    generated tokens. `constants` are tensors shared with other sequences; `freed_bytes` is what the
    latest append freed in another plane.
    """

    freed_bytes: int = 0

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many tokens it holds for each head."""

    @property
    def settled_tokens(self) -> int:
        """How many of the oldest tokens read back the same whatever is appended later."""
        return 0

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of other planes that reading this one touches."""
        return 0

    @abstractmethod
    def append(self, x: Tensor) -> None:
        """Add token vectors [heads, n, width]."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return all token vectors [heads, tokens, width] in the compute dtype."""

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Return the token vectors at `index` [heads, m], and the bytes that this touched."""
        return gather_tokens(self.read(), index), self.nbytes + self.borrowed_bytes

    def keep(self, index: Tensor) -> None:
        """Hold only the tokens at `index` [heads, m] (ascending, distinct), and free the others.

        What was dequantized for this is quantized again, in one go; formats that store each token
        by itself override this and move bytes only.
        """
        kept = gather_tokens(self.read(), index)
        self.clear()
        self.append(kept)

    @abstractmethod
    def clear(self) -> None:
        """Drop every token."""

    def facts(self) -> dict[str, int]:
        """Counts that depend on the data and that the bytes formula needs."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this sequence owns here, by name; wrapping planes add the inner's."""
        return dict(self.held)

    @property
    def shares_tokens(self) -> bool:
        """Whether each token is stored by itself and like any other: `share`, `adopt` work."""
        return False

    def share(self, start: int, end: int) -> Piece:
        """Return the tokens [start, end) as stored, for other sequences to `adopt`.

        Raises:
            BadInput: in this format tokens cannot be told apart.
        """
        raise self._unshared()

    def adopt(self, piece: Piece) -> None:
        """Add tokens that a plane of the same format has shared.

        Raises:
            BadInput: in this format tokens cannot be told apart.
        """
        raise self._unshared()

    def swap_out(self) -> dict[str, Tensor]:
        """Give away what this plane itself holds (not an inner one), and hold nothing."""
        held, self.held = self.held, {}
        return held

    def swap_in(self, held: Mapping[str, Tensor]) -> None:
        """Take back what `swap_out` gave."""
        self.held = dict(held)

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors()`."""
        return tensor_bytes(self.tensors())

    def _unshared(self) -> BadInput:
        return BadInput(
            f"tokens of a {type(self).__name__} cannot be shared: what is stored of one "
            "depends on others",
            fix="use a format that stores each token by itself, or do not reuse caches",
        )


class TokenCodec(ABC):
    """A format that stores each token vector by itself, so that tokens can be moved freely."""

    @abstractmethod
    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Turn [heads, n, width] into named tensors [heads, n, ...]."""

    @abstractmethod
    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Turn what `encode` made (of any tokens, of all heads) into [heads, n, width]."""

    def rotate(self, x: Tensor) -> Tensor:
        """Turn vectors [..., width] into the axes of `decode_rotated`."""
        return x

    def unrotate(self, x: Tensor) -> Tensor:
        """Undo `rotate`."""
        return x

    def decode_rotated(self, held: Mapping[str, Tensor]) -> Tensor:
        """`decode` in axes that are cheaper to decode in, where a format has such."""
        return self.decode(held)

    def constants(self) -> dict[str, Tensor]:
        """Tensors that all sequences share: codebooks, rotations, channel masks."""
        return {}


class FullCodec(TokenCodec):
    """Full precision: the vectors as they are."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Keep `x`."""
        return {"x": x}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        """Return what was kept."""
        return held["x"]


class TokenPlane(Plane):
    """A plane whose format stores each token by itself."""

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__()
        self.codec = codec
        self.constants = codec.constants()

    @property
    def tokens(self) -> int:
        """How many tokens it holds for each head."""
        return next(iter(self.held.values())).shape[1] if self.held else 0

    @property
    def settled_tokens(self) -> int:
        """All: each token is stored by itself."""
        return self.tokens

    def append(self, x: Tensor) -> None:
        """Encode and add token vectors."""
        new = self.codec.encode(x)
        if self.held:
            self.held = {name: torch.cat((self.held[name], new[name]), dim=1) for name in new}
        else:
            # A view of the projections would keep all of them alive.
            self.held = {name: tensor.contiguous() for name, tensor in new.items()}

    def read(self) -> Tensor:
        """Decode all tokens."""
        return self.codec.decode(self.held)

    def select(self, index: Tensor) -> tuple[Tensor, int]:
        """Decode only the tokens at `index`."""
        some = {name: gather_tokens(tensor, index) for name, tensor in self.held.items()}
        return self.codec.decode(some), tensor_bytes(some)

    def keep(self, index: Tensor) -> None:
        """Move the survivors' bytes; nothing is encoded again."""
        self.held = {name: gather_tokens(tensor, index) for name, tensor in self.held.items()}

    @property
    def shares_tokens(self) -> bool:
        """Yes."""
        return True

    def share(self, start: int, end: int) -> Piece:
        """Copy the stored bytes of the tokens [start, end)."""
        return Piece({name: x[:, start:end].clone() for name, x in self.held.items()})

    def adopt(self, piece: Piece) -> None:
        """Add stored tokens."""
        if self.held:
            new = piece.tensors
            self.held = {name: torch.cat((self.held[name], new[name]), dim=1) for name in new}
        else:
            self.held = {name: tensor.clone() for name, tensor in piece.tensors.items()}

    def clear(self) -> None:
        """Drop every token."""
        self.held = {}


def planes_within(plane: Plane) -> Iterator[Plane]:
    """A plane and the planes that it stores through, from the outside in."""
    yield plane
    for inner in vars(plane).values():
        if isinstance(inner, Plane):
            yield from planes_within(inner)


def full_plane(ctx: PlaneContext) -> TokenPlane:
    """A plane in full precision."""
    return TokenPlane(FullCodec())


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of named tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Pick tokens of [heads, n, ...] by `index` [heads or 1, m]: [heads, m, ...]."""
    heads = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[heads, index.expand(x.shape[0], -1)]
