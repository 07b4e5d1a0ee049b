import sys
import threading
import time

import pytest
from contracts.fake_nvml import DRAM, GIB, NOT_SUPPORTED, SM, TENSOR, FakeNvml

from kvtune.kernels.nvml import GpuSample, GpuSampler, gpu_uses, look_at_gpus, pause_between


def sample_until(sampler, count):
    deadline = time.monotonic() + 20
    with sampler:
        while len(sampler.samples) < count and time.monotonic() < deadline:
            time.sleep(0.002)
    return sampler.samples


def test_a_look_tells_memory_power_clocks_and_use():
    nvml = FakeNvml(hopper=False)
    (seen,) = look_at_gpus(nvml, {})
    assert (seen.gpu, seen.memory_used_bytes, seen.power_w) == (0, 30 * GIB, 351.5)
    assert (seen.sm_clock_mhz, seen.memory_clock_mhz) == (1755, 2619)
    assert (seen.busy_ratio, seen.memory_busy_ratio) == (0.97, 0.4)
    assert seen.slowed_by == ()
    assert seen.dram_bandwidth_ratio is None
    assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 1, "nothing is to be waited for"


def test_where_gpm_tells_of_the_time_between_two_looks_there_are_two(monkeypatch):
    pauses = []
    monkeypatch.setattr("kvtune.kernels.nvml.time.sleep", pauses.append)
    nvml = FakeNvml()
    (seen,) = look_at_gpus(nvml, {})
    assert (seen.sm_ratio, seen.tensor_ratio, seen.dram_bandwidth_ratio) == (0.8, 0.125, 0.9)
    assert pauses == [0.2], "NVML asks for more than a tenth of a second"
    assert (nvml.open_sessions, nvml.open_samples) == (0, 0)


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x1, ()),  # Idle.
        (0x4, ("power cap",)),
        (0x8 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
        (0x20 | 0x1, ("software thermal slowdown",)),
    ],
)
@pytest.mark.parametrize("missing", [(), ("nvmlDeviceGetCurrentClocksEventReasons",)])
def test_what_holds_the_clocks_back_is_named_under_both_names_of_the_call(reasons, names, missing):
    (seen,) = look_at_gpus(FakeNvml(reasons=reasons, missing=missing, hopper=False), {})
    assert seen.slowed_by == names


def test_gpm_tells_what_happened_between_two_samples():
    nvml = FakeNvml()
    first, *later = sample_until(GpuSampler(0.001, nvml, {}), 4)
    assert first.sm_ratio is None
    assert {(s.sm_ratio, s.tensor_ratio, s.dram_bandwidth_ratio) for s in later} == {
        (0.8, 0.125, 0.9)
    }
    times = [sample.at_s for sample in (first, *later)]
    assert times == sorted(times)


def test_a_gpm_metric_that_fails_is_unknown_and_the_others_are_told():
    nvml = FakeNvml(metric_status={TENSOR: NOT_SUPPORTED})
    seen = sample_until(GpuSampler(0.001, nvml, {}), 2)[1]
    assert (seen.sm_ratio, seen.tensor_ratio, seen.dram_bandwidth_ratio) == (0.8, None, 0.9)


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(hopper=False),
        FakeNvml(missing=("nvmlGpmQueryDeviceSupport",)),
        FakeNvml(missing=("nvmlGpmSampleAlloc",)),
        FakeNvml(missing=("nvmlGpmSampleGet",)),
        FakeNvml(missing=("nvmlGpmMetricsGet",)),
    ],
)
def test_without_gpm_the_rest_is_sampled(nvml):
    seen = sample_until(GpuSampler(0.001, nvml, {}), 3)
    assert {sample.dram_bandwidth_ratio for sample in seen} == {None}
    assert {sample.busy_ratio for sample in seen} == {0.97}


def test_what_a_gpu_does_not_tell_is_unknown():
    missing = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage")
    (seen,) = look_at_gpus(FakeNvml(missing=missing, hopper=False), {})
    assert (seen.memory_used_bytes, seen.power_w, seen.sm_clock_mhz) == (None, None, 1755)


def test_sampling_ends_with_the_block_and_leaves_nothing_open():
    nvml = FakeNvml()
    before = threading.active_count()
    sampler = GpuSampler(0.001, nvml, {})
    sample_until(sampler, 3)
    calls = len(nvml.calls)
    assert threading.active_count() == before
    assert (nvml.open_sessions, nvml.open_samples) == (0, 0)
    assert nvml.threads == {"kvtune-gpu-sampler"}
    assert sampler.note is None
    assert len(nvml.calls) == calls


def test_a_long_interval_does_not_delay_the_end():
    with GpuSampler(3600.0, FakeNvml(), {}) as sampler:
        assert len(sampler.samples) == 1, "the block begins after the first look"


def test_an_nvml_that_never_answers_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr("kvtune.kernels.nvml.ANSWER_S", 0.05)
    answers = threading.Event()

    class Hanging(FakeNvml):
        def nvmlInit(self):
            answers.wait()
            super().nvmlInit()

    try:
        with GpuSampler(0.001, Hanging(), {}) as sampler:
            pass
        assert (sampler.samples, sampler.note) == ((), "NVML does not answer")
    finally:
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "kvtune-gpu-sampler":
                thread.join()


def test_an_error_in_the_block_comes_through_and_ends_the_sampling():
    nvml = FakeNvml()
    with pytest.raises(ZeroDivisionError), GpuSampler(0.001, nvml, {}):
        raise ZeroDivisionError
    assert nvml.open_sessions == 0


def test_a_gpu_that_is_lost_ends_with_a_note_and_keeps_what_was_seen():
    nvml = FakeNvml(lost_after=40)
    sampler = GpuSampler(0.0, nvml, {})
    with sampler:
        sampler._thread.join(20)
    assert sampler.note == "GPU 0 does not answer NVML any more"
    assert sampler.samples
    assert nvml.open_sessions == 0


def test_what_each_gpu_did_is_summed_up_by_the_looks_that_tell():
    first = GpuSample(at_s=0.0, gpu=1, memory_used_bytes=3 * GIB, power_w=100.0, busy_ratio=0.2)
    later = GpuSample(
        at_s=1.0,
        gpu=1,
        memory_used_bytes=2 * GIB,
        power_w=300.0,
        busy_ratio=0.6,
        dram_bandwidth_ratio=0.9,
        slowed_by=("power cap",),
    )
    other, one = gpu_uses([first, GpuSample(at_s=0.0, gpu=0, sm_clock_mhz=1980), later])
    assert (other.gpu, other.samples, other.sm_clock_mhz) == (0, 1, 1980)
    assert (other.busy_ratio, other.memory_used_bytes, other.slowed_by) == (None, None, ())
    assert (one.gpu, one.samples, one.memory_used_bytes) == (1, 2, 3 * GIB)
    assert (one.power_w, one.busy_ratio) == (200.0, pytest.approx(0.4))
    assert one.dram_bandwidth_ratio == 0.9, "the first look tells no share"
    assert (one.slowed_ratio, one.slowed_by) == (0.5, ("power cap",))
    assert gpu_uses(()) == ()


def test_without_a_driver_there_is_one_clear_line_and_no_sample():
    nvml = FakeNvml(missing=("nvmlInit",))
    with GpuSampler(0.001, nvml, {}) as sampler:
        sampler._thread.join(20)
    assert sampler.samples == look_at_gpus(nvml, {}) == ()
    assert sampler.note == "NVML does not start (Not Supported); is there a driver?"


def test_without_nvidia_ml_py_the_note_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuSampler(0.001) as sampler:
        sampler._thread.join(20)
    assert "pip install 'kvtune[gpu]'" in sampler.note


def test_a_costly_driver_is_asked_less_often():
    # A sample of 20 ms may come every 20 s.
    assert pause_between(1.0, 0.020) == pytest.approx(20.0)
    assert pause_between(1.0, 0.0005) == 1.0
    nvml = FakeNvml(slow_s=0.02)
    with GpuSampler(0.001, nvml, {}) as sampler:
        sampler._stop.wait(0.3)
    assert len(sampler.samples) == 1


def test_the_installed_module_has_what_is_asked_for():
    pynvml = pytest.importorskip("pynvml")
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM) == (1, 2)
    assert pynvml.NVML_GPM_METRIC_SM_UTIL == SM
    assert pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL == TENSOR
    assert pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL == DRAM
    assert pynvml.nvmlClocksEventReasonSwPowerCap == 0x4
    assert pynvml.nvmlClocksEventReasonHwThermalSlowdown == 0x40
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    fields = {"version", "numMetrics", "sample1", "sample2", "metrics"}
    assert fields <= {name for name, _ in asked._fields_}
    for metric in asked.metrics[:1]:
        metric.metricId = DRAM
    assert asked.metrics[0].metricId == DRAM, "metrics are changed in place"
    nvml = FakeNvml()
    sample_until(GpuSampler(0.001, nvml, {}), 2)
    assert [name for name in set(nvml.calls) if not hasattr(pynvml, name)] == []
