"""The extreme values of a vector, to be stored beside a dense code at fixed cost.

A fixed number of slots a vector, instead of all values above a threshold, makes bytes exact and
needs no row pointers (capped outliers of KVQuant, 2401.18079; GEAR, 2403.05527).
torch is imported only when something is computed, so that counts and bytes are usable without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtune.lazy import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

_ROUNDING = 1e-9


def outlier_counts(ratio: float, size: int) -> tuple[int, int]:
    """Return how many of the smallest and of the largest of `size` values are outliers.

    Half of `ratio` at each end, rounded down but at least one where `ratio` is not 0; all values
    where it is 1. A vector of one value has no outliers below that.
    """
    if ratio >= 1:
        return size // 2, size - size // 2
    if ratio <= 0:
        return 0, 0
    each = min(max(int(ratio * size / 2 + _ROUNDING), 1), size // 2)
    return each, each


def extremes(x: Tensor, dim: int, low: int, high: int) -> Tensor:
    """Return the indices of the `low` smallest and `high` largest values along `dim`.

    Distinct; equal values are ordered by index, so that the choice is deterministic.

    Args:
        x: any shape, NaN-free.
        dim: of the vectors.
        low: at least 0; low + high at most the size of `dim`.
        high: at least 0.

    Returns:
        x's shape with `dim` of size low + high, int64, the smallest first.
    """
    order = torch.sort(x, dim=dim, stable=True).indices
    size = x.shape[dim]
    return torch.cat((order.narrow(dim, 0, low), order.narrow(dim, size - high, high)), dim)


def index_bytes(size: int) -> int:
    """Return the bytes of a stored index into `size` values: 1, 2 or 4."""
    return 1 if size <= 1 << 8 else 2 if size <= 1 << 16 else 4


def stored_index(index: Tensor, size: int) -> Tensor:
    """Return an int64 index as it is stored; `.long()` gets it back."""
    types = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
    return index.to(types[index_bytes(size)])
