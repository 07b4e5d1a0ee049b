"""What this machine computes on: an NVIDIA GPU seen through NVML, else the CPU.

A machine without a driver is an ordinary case, never an error.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.kernels.nvml import NvmlUnavailable, as_text, nvml_session, visible_handles
from kvtune.types import Device

CPUINFO = Path("/proc/cpuinfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class DeviceDetail:
    """What decides which kernels a device runs, beyond its name and memory.

    `compute_capability` is CUDA's (major, minor), None on a CPU. `cpu_flags` are the feature names
    of the host CPU as the kernel spells them, such as `avx512f` or `amx_bf16`.
    """

    compute_capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()


def detect_device(nvml: Any = None, environment: Mapping[str, str] | None = None) -> Device:
    """Return the device a model would run on: the visible GPUs if NVML sees any, else the CPU.

    Args:
        nvml: a module with the functions of `pynvml`; None imports the installed one.
        environment: where `CUDA_VISIBLE_DEVICES` is read from; None is this process's.

    A CPU counts its usable cores, and the memory that a container may take of the machine's; GPUs
    are named after the first visible one.
    """
    try:
        with nvml_session(nvml) as session:
            return _cuda_device(session, visible_handles(session, environment))
    except NvmlUnavailable:
        return _cpu_device()


def detect_detail(nvml: Any = None, environment: Mapping[str, str] | None = None) -> DeviceDetail:
    """Return the compute capability of the first visible GPU and the CPU's features."""
    capability: tuple[int, int] | None = None
    try:
        with nvml_session(nvml) as session:
            handle = visible_handles(session, environment)[0]
            major, minor = session.nvmlDeviceGetCudaComputeCapability(handle)
            capability = (int(major), int(minor))
    except NvmlUnavailable:
        pass
    return DeviceDetail(capability, cpu_flags())


def gpu_status(nvml: Any = None, environment: Mapping[str, str] | None = None) -> str:
    """Say in one line which GPUs are usable, or why none is."""
    try:
        with nvml_session(nvml) as session:
            device = _cuda_device(session, visible_handles(session, environment))
    except NvmlUnavailable as reason:
        return f"no usable GPU: {reason}"
    return f"{device.count} x {device.name}, driver {device.driver}"


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Return the CPU's feature names; empty where the system does not list them.

    Args:
        cpuinfo: the text of `/proc/cpuinfo`; None reads this machine's.
    """
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    listed = _cpuinfo_field(text, "flags") or _cpuinfo_field(text, "Features") or ""
    return frozenset(listed.split())


def _cuda_device(nvml: Any, handles: list[Any]) -> Device:
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handles[0]).total)
    except nvml.NVMLError:
        memory_bytes = None  # GPUs that share the host's memory do not report their own.
    return Device(
        kind="cuda",
        name=as_text(nvml.nvmlDeviceGetName(handles[0])),
        count=len(handles),
        memory_bytes=memory_bytes,
        driver=as_text(nvml.nvmlSystemGetDriverVersion()),
    )


def _cpu_device() -> Device:
    import psutil

    memory_bytes = int(psutil.virtual_memory().total)
    # There is no limit, or it says "max".
    with contextlib.suppress(OSError, ValueError):
        memory_bytes = min(memory_bytes, int(CONTAINER_LIMIT.read_text()))
    return Device(
        kind="cpu",
        name=_cpuinfo_field(_read_cpuinfo(), "model name") or platform.machine(),
        count=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
    )


def _read_cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpuinfo_field(text: str, name: str) -> str | None:
    """Return the first value of a field of `/proc/cpuinfo`."""
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator and key.strip() == name:
            return value.strip()
    return None
