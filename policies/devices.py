"""Accelerators by name: what their data sheets say, for planning without one at hand.

Ceilings that were measured on a device are better; these are upper bounds by the vendor (dense
16-bit matrix rate, no sparsity; memory as sold, of which a driver keeps a little).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.errors import BadInput

GB = 10**9
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device: memory, memory bandwidth and 16-bit matrix rate."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    matrix_flop_per_s: float
    source: str


def _spec(name: str, memory_bytes: int, gb_per_s: float, tflop: float, sheet: str) -> DeviceSpec:
    return DeviceSpec(name, memory_bytes, gb_per_s * GB, tflop * 1e12, f"{sheet} data sheet")


DEVICES = {
    spec.name: spec
    for spec in (
        _spec("a100-40gb", 40 * GIB, 1555, 312, "NVIDIA A100 SXM"),
        _spec("a100-80gb", 80 * GIB, 2039, 312, "NVIDIA A100 SXM"),
        _spec("h100", 80 * GIB, 3350, 989, "NVIDIA H100 SXM"),
        _spec("h100-pcie", 80 * GIB, 2000, 756, "NVIDIA H100 PCIe"),
        _spec("h200", 141 * GB, 4800, 989, "NVIDIA H200 SXM"),
        _spec("b200", 180 * GB, 8000, 2250, "NVIDIA B200 SXM"),
        _spec("l4", 24 * GB, 300, 121, "NVIDIA L4"),
        _spec("l40s", 48 * GB, 864, 362, "NVIDIA L40S"),
        _spec("rtx4090", 24 * GB, 1008, 165, "NVIDIA GeForce RTX 4090"),
        _spec("mi300x", 192 * GB, 5300, 1307, "AMD MI300X"),
    )
}


def find_device(name: str) -> DeviceSpec:
    """Return a device by name.

    Raises:
        BadInput: it is not in the table.
    """
    spec = DEVICES.get(name.lower())
    if spec is None:
        raise BadInput(
            f"unknown device {name!r}",
            fix="one of: " + ", ".join(DEVICES) + "; or give --memory-gib and --bandwidth-gb-s",
        )
    return spec
