import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import pytest

from kvtune.kernels import device
from kvtune.kernels.device import DeviceDetail, cpu_flags, detect_detail, detect_device, gpu_status

GIB = 1 << 30

X86 = """processor\t: 0
model name\t: Example Xeon
flags\t\t: fpu avx2 avx512f amx_tile

processor\t: 1
model name\t: Example Xeon
flags\t\t: fpu avx2 avx512f amx_tile
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd sve bf16
"""


@dataclass(frozen=True)
class FakeGpu:
    name: str | bytes
    capability: tuple[int, int]
    memory_bytes: int | None
    uuid: str = "GPU-0"

    @property
    def total(self):
        return self.memory_bytes


@dataclass
class FakeNvml:
    """Stands in for the module `pynvml`, which needs an NVIDIA driver."""

    gpus: list[FakeGpu]
    broken_call: str | None = None
    mig: tuple[FakeGpu, ...] = ()
    open_sessions: int = 0
    NVMLError: type[Exception] = field(default=type("NVMLError", (Exception,), {}))

    def __getattribute__(self, name):
        if name.startswith("nvml") and name == object.__getattribute__(self, "broken_call"):
            raise self.NVMLError(f"{name} is not supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        self.open_sessions += 1

    def nvmlShutdown(self):
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return next(gpu for gpu in (*self.gpus, *self.mig) if gpu.uuid == uuid)

    def nvmlDeviceGetName(self, gpu):
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu):
        if gpu.memory_bytes is None:
            raise self.NVMLError("not supported")
        return gpu

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return gpu.capability

    def nvmlSystemGetDriverVersion(self):
        return b"570.86"


H100 = FakeGpu("NVIDIA H100", (9, 0), 80 * GIB, "GPU-a")
L4 = FakeGpu(b"NVIDIA L4", (8, 9), 24 * GIB, "GPU-b")


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(X86)
    monkeypatch.setattr(device, "CPUINFO", file)


def test_visible_gpus_are_counted_and_named_after_the_first():
    nvml = FakeNvml([H100, H100])
    found = detect_device(nvml, {})
    assert (found.kind, found.name, found.count) == ("cuda", "NVIDIA H100", 2)
    assert (found.memory_bytes, found.driver) == (80 * GIB, "570.86")
    assert detect_detail(nvml, {}).compute_capability == (9, 0)
    assert gpu_status(nvml, {}) == "2 x NVIDIA H100, driver 570.86"
    assert nvml.open_sessions == 0


@pytest.mark.parametrize(
    ("visible", "name", "count"),
    [
        ("1", "NVIDIA L4", 1),
        ("1,0", "NVIDIA L4", 2),
        ("GPU-b", "NVIDIA L4", 1),
        ("0, 1", "NVIDIA H100", 2),
        ("0,7,1", "NVIDIA H100", 1),
    ],
)
def test_only_gpus_that_cuda_would_see_count(visible, name, count):
    found = detect_device(FakeNvml([H100, L4]), {"CUDA_VISIBLE_DEVICES": visible})
    assert (found.name, found.count) == (name, count)


@pytest.mark.parametrize("visible", ["MIG-a", "MIG-a,MIG-b", "MIG-a,0"])
def test_a_part_of_a_gpu_is_a_device_of_its_own_and_the_only_one(visible):
    parts = tuple(
        FakeGpu(f"NVIDIA H100 MIG 3g.40gb {name}", (9, 0), 40 * GIB, f"MIG-{name}") for name in "ab"
    )
    nvml, environment = FakeNvml([H100], mig=parts), {"CUDA_VISIBLE_DEVICES": visible}
    found = detect_device(nvml, environment)
    assert (found.kind, found.name) == ("cuda", "NVIDIA H100 MIG 3g.40gb a")
    assert (found.count, found.memory_bytes) == (1, 40 * GIB)
    assert detect_detail(nvml, environment).compute_capability == (9, 0)


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_hidden_gpus_leave_the_cpu_and_the_status_says_who_hid_them(cpu, visible):
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    assert detect_device(FakeNvml([H100]), environment).kind == "cpu"
    status = gpu_status(FakeNvml([H100]), environment)
    assert status == f"no usable GPU: CUDA_VISIBLE_DEVICES={visible!r} hides all 1 GPUs"


def test_a_gpu_without_memory_of_its_own_has_unknown_memory():
    found = detect_device(FakeNvml([FakeGpu("NVIDIA GB10", (12, 1), None)]), {})
    assert (found.kind, found.memory_bytes) == ("cuda", None)


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (FakeNvml([H100], "nvmlInit"), "NVML does not start (nvmlInit is not supported)"),
        (FakeNvml([H100], "nvmlDeviceGetName"), "NVML fails (nvmlDeviceGetName is not supported)"),
        (FakeNvml([]), "NVML starts but finds no GPU"),
    ],
)
def test_an_nvml_that_fails_leaves_the_cpu_and_one_clear_line(cpu, nvml, why):
    assert detect_device(nvml, {}).kind == "cpu"
    assert detect_detail(nvml, {}).compute_capability in (None, (9, 0))
    status = gpu_status(nvml, {})
    assert status.startswith("no usable GPU: ")
    assert why in status
    assert "\n" not in status
    assert nvml.open_sessions == 0


def test_without_nvidia_ml_py_the_status_says_what_to_install(cpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'kvtune[gpu]'" in gpu_status()
    assert detect_device().kind == "cpu"


def test_a_cpu_is_named_and_its_usable_cores_counted(cpu, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 2, 5})
    found = detect_device(FakeNvml([]), {})
    assert (found.kind, found.name, found.count) == ("cpu", "Example Xeon", 3)
    assert found.memory_bytes > 0
    assert found.driver is None
    assert detect_detail(FakeNvml([]), {}) == DeviceDetail(
        None, frozenset({"fpu", "avx2", "avx512f", "amx_tile"})
    )


@pytest.mark.parametrize(
    ("limit", "memory_bytes"),
    [("4294967296", 4 * GIB), (str(64 * GIB), 16 * GIB), ("max", 16 * GIB)],
)
def test_memory_of_a_container_is_what_it_may_take(cpu, monkeypatch, tmp_path, limit, memory_bytes):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(device, "CONTAINER_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB))
    assert detect_device(FakeNvml([])).memory_bytes == memory_bytes
    monkeypatch.setattr(device, "CONTAINER_LIMIT", tmp_path / "nothing")
    assert detect_device(FakeNvml([])).memory_bytes == 16 * GIB


def test_flags_are_read_from_x86_and_arm_and_missing_elsewhere(monkeypatch, tmp_path):
    assert {"avx512f", "amx_tile"} <= cpu_flags(X86)
    assert cpu_flags(ARM) == {"fp", "asimd", "sve", "bf16"}
    assert cpu_flags("") == frozenset()
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "absent")
    assert cpu_flags() == frozenset()
    assert detect_device(FakeNvml([]), {}).name


def test_this_machine_is_described_without_an_error():
    assert detect_device().count >= 1
    assert gpu_status()
