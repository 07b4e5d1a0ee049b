"""NVIDIA GPUs through NVML: which are visible, and what they do while something runs.

NVML is asked through the module `pynvml` of nvidia-ml-py, which is imported only when something
here is called. Names and bits are those of NVIDIA's NVML API reference; GPM (GPU Performance
Monitoring) is there on Hopper and newer, with a driver that has it. Tested against a stand-in for
`pynvml`; it has not sampled a real GPU yet.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from kvtune.types import GpuUse

GPM_INTERVAL_S = 0.2
"""Between two looks; NVML asks for more than 0.1 s, for GPM counts no finer."""

ANSWER_S = 10.0
"""How long NVML is waited for. A GPU that fell off the bus may keep it from ever answering."""

COST_SHARE = 0.001
"""The most that sampling may take of one CPU core; samples are taken less often to keep it."""

# nvmlClocksEventReasons*; bit 0x1, idle, is no slowdown.
_SLOWDOWNS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
_NVML_CLOCK_SM = 1
_NVML_CLOCK_MEM = 2
# NVML_GPM_METRIC_*, all in percent.
_GPM_METRICS = {"sm_ratio": 2, "tensor_ratio": 5, "dram_bandwidth_ratio": 10}


class NvmlUnavailable(Exception):
    """NVML cannot be used; the text says why in one line. Caught wherever NVML is asked."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU; None is what it does not tell. `gpu` counts the visible ones from 0.

    `at_s` is on the clock of `time.monotonic`. `busy_ratio` is the share of time in which any
    kernel ran, `memory_busy_ratio` that in which memory was read or written: neither says how much.
    The last three do, as shares of the most possible since the sample before: SMs with work, SMs
    with tensor operations, bandwidth of the memory. `slowed_by` is what holds the clocks back.
    """

    at_s: float
    gpu: int
    memory_used_bytes: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()
    busy_ratio: float | None = None
    memory_busy_ratio: float | None = None
    sm_ratio: float | None = None
    tensor_ratio: float | None = None
    dram_bandwidth_ratio: float | None = None


class GpuSampler:
    """Samples every visible GPU from a thread of its own while the block runs.

        with GpuSampler() as sampler:
            work()
        print(sampler.samples, sampler.note)

    Args:
        interval_s: seconds between samples; longer where samples cost more than `COST_SHARE`.
        nvml: a module with the functions of `pynvml`; None imports the installed one.
        environment: where `CUDA_VISIBLE_DEVICES` is read from; None is this process's.

    The block begins after the first look, or `ANSWER_S` without one. Nothing is raised where there
    is no GPU or it stops answering: `samples` has what was seen, and `note` says in one line why
    there is no more.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        nvml: Any = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.note: str | None = None
        self._nvml = nvml
        self._environment = environment
        self._samples: list[GpuSample] = []
        self._begun, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtune-gpu-sampler", daemon=True)

    @property
    def samples(self) -> tuple[GpuSample, ...]:
        """What was seen so far, in the order of time."""
        return tuple(self._samples)

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait(ANSWER_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():
            self.note = "NVML does not answer"

    def _run(self) -> None:
        try:
            with open_gpus(self._nvml, self._environment) as gpus:
                pause_s = 0.0
                while not self._stop.wait(pause_s):
                    began_s = time.thread_time()
                    self._samples += [gpu.look() for gpu in gpus]
                    self._begun.set()
                    pause_s = pause_between(self.interval_s, time.thread_time() - began_s)
        except NvmlUnavailable as reason:
            self.note = str(reason)
        finally:
            self._begun.set()


def gpu_uses(samples: Sequence[GpuSample]) -> tuple[GpuUse, ...]:
    """Sum up what each GPU did over all its samples."""
    by_gpu: dict[int, list[GpuSample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    return tuple(_gpu_use(gpu, seen) for gpu, seen in sorted(by_gpu.items()))


def _gpu_use(gpu: int, seen: Sequence[GpuSample]) -> GpuUse:
    def told(name: str) -> list[float]:
        return [value for one in seen if (value := getattr(one, name)) is not None]

    def mean(name: str) -> float | None:
        return fmean(told(name)) if told(name) else None

    return GpuUse(
        gpu=gpu,
        samples=len(seen),
        busy_ratio=mean("busy_ratio"),
        sm_ratio=mean("sm_ratio"),
        tensor_ratio=mean("tensor_ratio"),
        dram_bandwidth_ratio=mean("dram_bandwidth_ratio"),
        sm_clock_mhz=mean("sm_clock_mhz"),
        memory_clock_mhz=mean("memory_clock_mhz"),
        slowed_ratio=fmean(bool(one.slowed_by) for one in seen),
        slowed_by=tuple(sorted({why for one in seen for why in one.slowed_by})),
        memory_used_bytes=max(map(int, told("memory_used_bytes")), default=None),
        power_w=mean("power_w"),
    )


def pause_between(interval_s: float, cost_s: float) -> float:
    """Seconds to wait after a sample that took `cost_s` seconds of CPU."""
    return max(interval_s, cost_s / COST_SHARE)


def look_at_gpus(
    nvml: Any = None, environment: Mapping[str, str] | None = None
) -> tuple[GpuSample, ...]:
    """What every visible GPU does now; empty where there is none, or it does not answer.

    Where GPM tells more, this takes `GPM_INTERVAL_S` seconds, which are what its shares are of.
    """
    try:
        with open_gpus(nvml, environment) as gpus:
            seen = tuple(gpu.look() for gpu in gpus)
            if any(gpu.has_gpm for gpu in gpus):
                time.sleep(GPM_INTERVAL_S)
                seen = tuple(gpu.look() for gpu in gpus)
            return seen
    except NvmlUnavailable:
        return ()


class Gpu:
    """A GPU of an open session. GPM tells what happened between two looks."""

    def __init__(self, nvml: Any, handle: Any, number: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._number = number
        self._gpm_samples: list[Any] = []
        self._gpm_started = False
        support = self._ask("nvmlGpmQueryDeviceSupport")
        if support is not None and support.isSupportedDevice:
            try:
                for _ in range(2):
                    self._gpm_samples.append(nvml.nvmlGpmSampleAlloc())
            except nvml.NVMLError:
                self.close()

    @property
    def has_gpm(self) -> bool:
        """Whether a look tells what happened since the one before."""
        return self._gpm_started

    def look(self) -> GpuSample:
        """Ask for everything once.

        Raises:
            NvmlUnavailable: nothing is answered.
        """
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        sm_clock = self._ask("nvmlDeviceGetClockInfo", _NVML_CLOCK_SM)
        memory_clock = self._ask("nvmlDeviceGetClockInfo", _NVML_CLOCK_MEM)
        busy = self._ask("nvmlDeviceGetUtilizationRates")
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # The older name of the same, for older releases of nvidia-ml-py.
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if all(said is None for said in (memory, power_mw, sm_clock, memory_clock, busy, reasons)):
            raise NvmlUnavailable(f"GPU {self._number} does not answer NVML any more")
        return GpuSample(
            at_s=time.monotonic(),
            gpu=self._number,
            memory_used_bytes=None if memory is None else int(memory.used),
            power_w=None if power_mw is None else power_mw / 1e3,
            sm_clock_mhz=sm_clock,
            memory_clock_mhz=memory_clock,
            slowed_by=tuple(name for bit, name in _SLOWDOWNS.items() if (reasons or 0) & bit),
            busy_ratio=None if busy is None else busy.gpu / 100,
            memory_busy_ratio=None if busy is None else busy.memory / 100,
            **self._gpm(),
        )

    def close(self) -> None:
        """Free what GPM took; may be called twice."""
        for sample in self._gpm_samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except self._nvml.NVMLError:
                continue  # The GPU is gone, and its samples with it.
        self._gpm_samples.clear()

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML says of this GPU; None where the GPU, the driver or the module cannot tell."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _gpm(self) -> dict[str, float]:
        """Shares of the most possible since the last look; empty at the first one."""
        if not self._gpm_samples:
            return {}
        nvml = self._nvml
        self._gpm_samples.reverse()
        before, now = self._gpm_samples
        try:
            nvml.nvmlGpmSampleGet(self._handle, now)
            if not self._gpm_started:
                self._gpm_started = True
                return {}
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(_GPM_METRICS)
            asked.sample1, asked.sample2 = before, now
            for metric, number in zip(asked.metrics, _GPM_METRICS.values(), strict=False):
                metric.metricId = number
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:
            self._gpm_started = False
            return {}
        return {
            name: metric.value / 100
            for name, metric in zip(_GPM_METRICS, asked.metrics, strict=False)
            if metric.nvmlReturn == nvml.NVML_SUCCESS
        }


@contextmanager
def open_gpus(nvml: Any, environment: Mapping[str, str] | None) -> Iterator[list[Gpu]]:
    """Yield the visible GPUs, at least one; raises `NvmlUnavailable` where there is none."""
    with nvml_session(nvml) as session, ExitStack() as opened:
        gpus = []
        for number, handle in enumerate(visible_handles(session, environment)):
            gpus.append(Gpu(session, handle, number))
            opened.callback(gpus[-1].close)
        yield gpus


@contextmanager
def nvml_session(nvml: Any) -> Iterator[Any]:
    """Yield an initialised NVML, and turn each of its errors into `NvmlUnavailable`."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NvmlUnavailable(
                "nvidia-ml-py is not installed; pip install 'kvtune[gpu]' on a machine with a GPU"
            ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start ({error}); is there a driver?") from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML fails ({error})") from None
    finally:
        nvml.nvmlShutdown()


def visible_handles(nvml: Any, environment: Mapping[str, str] | None) -> list[Any]:
    """Return the handles of the GPUs that CUDA would see, at least one.

    A process sees one MIG device at most (NVIDIA's MIG user guide, device enumeration).
    """
    count = nvml.nvmlDeviceGetCount()
    if not count:
        raise NvmlUnavailable("NVML starts but finds no GPU")
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdigit() and int(entry) < count:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith("GPU-"):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
        elif entry.startswith("MIG-"):
            return [*handles, nvml.nvmlDeviceGetHandleByUUID(entry)]
        else:
            break  # CUDA ignores everything from the first entry that names no device.
    if not handles:
        raise NvmlUnavailable(f"CUDA_VISIBLE_DEVICES={listed!r} hides all {count} GPUs")
    return handles


def as_text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py answer bytes."""
    return value.decode() if isinstance(value, bytes) else value
