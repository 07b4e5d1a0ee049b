"""A fake of the module `pynvml`: one GPU, as NVML describes it. It has never seen a real one."""

import ctypes
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30
SM, TENSOR, DRAM = 2, 5, 10  # NVML_GPM_METRIC_SM_UTIL, _ANY_TENSOR_UTIL, _DRAM_BW_UTIL
NOT_SUPPORTED = 3


class NVMLError(Exception):
    pass


class Metric(ctypes.Structure):
    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", ctypes.c_double),
    )


@dataclass
class MetricsGet:
    version: int = 0
    numMetrics: int = 0
    sample1: object = None
    sample2: object = None
    metrics: object = field(default_factory=lambda: (Metric * 8)())


@dataclass
class FakeNvml:
    """Stands in for `pynvml`, with one GPU whose GPM counters grow with every sample.

    `missing` names functions that the driver does not support; `lost_after` is the number of calls
    after which the GPU falls off the bus.
    """

    missing: tuple[str, ...] = ()
    hopper: bool = True
    lost_after: float = float("inf")
    metric_status: dict[int, int] = field(default_factory=dict)
    slow_s: float = 0.0
    reasons: int = 0
    calls: list[str] = field(default_factory=list)
    open_sessions: int = 0
    open_samples: int = 0
    clock: int = 0
    threads: set[str] = field(default_factory=set)
    NVMLError: type[Exception] = NVMLError
    NVML_SUCCESS: int = 0
    NVML_GPM_METRICS_GET_VERSION: int = 1
    c_nvmlGpmMetricsGet_t: type = MetricsGet

    def __getattribute__(self, name):
        get = object.__getattribute__
        if name.startswith("nvml"):
            calls = get(self, "calls")
            calls.append(name)
            get(self, "threads").add(threading.current_thread().name)
            if name in get(self, "missing"):
                raise NVMLError("Not Supported")
            if len(calls) > get(self, "lost_after") and name != "nvmlShutdown":
                raise NVMLError("GPU is lost")
        return get(self, name)

    def nvmlInit(self):
        self.open_sessions += 1

    def nvmlShutdown(self):
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu {index}"

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H100"

    def nvmlSystemGetDriverVersion(self):
        return "570.86"

    def nvmlDeviceGetMemoryInfo(self, handle):
        ends = time.thread_time() + self.slow_s
        while time.thread_time() < ends:
            pass
        return SimpleNamespace(total=80 * GIB, used=30 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 351_500

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1755, 2: 2619}[kind]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.reasons

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self.hopper))

    def nvmlGpmSampleAlloc(self):
        self.open_samples += 1
        return SimpleNamespace(taken_at=None)

    def nvmlGpmSampleFree(self, sample):
        self.open_samples -= 1

    def nvmlGpmSampleGet(self, handle, sample):
        self.clock += 1
        sample.taken_at = self.clock

    def nvmlGpmMetricsGet(self, asked):
        assert asked.version == 1
        assert asked.sample2.taken_at == asked.sample1.taken_at + 1, "samples in the order of time"
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = self.metric_status.get(metric.metricId, 0)
            metric.value = {SM: 80.0, TENSOR: 12.5, DRAM: 90.0}[metric.metricId]
