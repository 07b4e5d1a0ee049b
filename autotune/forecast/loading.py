"""How fast a second tier gives back what it holds: assumed, bounded by what the device copies.

A step takes as much longer as what it loads takes. Copies to the tier are left out: nobody measured
them by themselves. A server with kvtune's plugin counts the seconds of both
(`kvtune:tier_seconds_total`), but no history keeps them yet.
"""

from __future__ import annotations

import math

Speeds = tuple[float, float, float]

LOADED_ON_GPU: Speeds = (10e9, 20e9, 50e9)
"""How fast blocks come back to a GPU (least, expected, most): a link of 16 lanes moves 32 GB/s by
PCIe 4.0 and 64 by 5.0, and copies of many blocks do not reach that."""

LOADED_ON_CPU: Speeds = (0.3e9, 2e9, 8e9)
"""The same where a CPU computes. Pages of 48 KiB, copied as kvtune's plugin does it, came at 2 GB/s
on one core that others used too, and at 0.3 where they touched memory first. How much faster a
quiet machine is was not tried."""


def load_speeds(assumed: Speeds, copy_bytes_per_s: float | None) -> Speeds:
    """Bytes a second: least, expected and most.

    Nothing is copied faster than memory is read and written on the device: `copy_bytes_per_s`
    counts both.
    """
    most = math.inf if copy_bytes_per_s is None else copy_bytes_per_s / 2
    least, expected, best = (min(speed, most) for speed in assumed)
    return least, expected, best
