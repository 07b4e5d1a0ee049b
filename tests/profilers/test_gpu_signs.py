"""What GPUs measure of themselves, in a verdict."""

import pytest
from contracts.windows import long_decode, row, short_decode, with_idle_time

from kvtune.profilers.verdict import judge
from kvtune.types import Bottleneck, GpuUse

UNKNOWN_MODEL = {"weight_bytes": None, "kv_bytes_per_token": None}
NO_ESTIMATE = {"tflops_per_s": 0.0, "gbytes_per_s": 0.0, "peak_bytes_per_s": None}


def use(gpu=0, **changed):
    figures = {"busy_ratio": 0.9, "sm_ratio": 0.3, "tensor_ratio": 0.1, "dram_bandwidth_ratio": 0.1}
    return GpuUse(**{"gpu": gpu, "samples": 30, **figures, **changed})


def test_shares_are_of_the_time_in_which_requests_run_and_the_mean_of_all_gpus():
    seen = with_idle_time(short_decode(gpus=(use(dram_bandwidth_ratio=0.2), use(1))), 2)
    verdict = judge(seen)
    assert row(verdict, "gpu_memory_bandwidth_share").value == pytest.approx(0.45)
    assert row(verdict, "gpu_memory_bandwidth_share").holds is True
    assert row(verdict, "gpu_tensor_share").value == pytest.approx(0.3)
    assert row(verdict, "gpu_sm_share").source == "NVML GPM"


def test_a_gpu_that_does_nothing_meanwhile_is_not_the_servers():
    for seen in (short_decode(), short_decode(gpus=(use(busy_ratio=0.01),))):
        assert not any(item.metric.startswith("gpu_") for item in judge(seen).evidence)


def test_without_gpm_the_estimate_stands_in():
    verdict = judge(long_decode(gpus=(GpuUse(gpu=0, samples=30, busy_ratio=0.9),)))
    assert row(verdict, "gpu_memory_bandwidth_share").holds is None
    assert verdict.summary == judge(long_decode()).summary


def test_clocks_that_are_held_back_are_told_with_the_reason():
    slowed = use(slowed_ratio=0.5, slowed_by=("power cap",))
    told = row(judge(short_decode(gpus=(slowed,))), "gpu_slowed_share")
    assert (told.value, told.holds) == (0.5, True)
    assert told.says.endswith("by power cap")


def test_measured_traffic_comes_before_the_estimate_of_the_engine():
    busy, quiet = use(dram_bandwidth_ratio=0.8), use(dram_bandwidth_ratio=0.05, tensor_ratio=0.02)
    modelled, measured = (judge(long_decode(gpus=gpus, **NO_ESTIMATE)) for gpus in ((), (busy,)))
    assert modelled.bottleneck is measured.bottleneck is Bottleneck.KV_BANDWIDTH
    assert (modelled.confidence, measured.confidence) == ("low", "high")
    assert "80% of the memory's bandwidth" in judge(long_decode(gpus=(busy,))).summary
    assert judge(long_decode()).bottleneck is Bottleneck.KV_BANDWIDTH
    hardly_used = judge(long_decode(gpus=(quiet,)))
    assert (hardly_used.bottleneck, hardly_used.confidence) == (Bottleneck.OVERHEAD, "medium")
    at_work = judge(long_decode(gpus=(quiet.model_copy(update={"sm_ratio": 0.9}),)))
    assert (at_work.bottleneck, at_work.confidence) == (Bottleneck.OVERHEAD, "low")


def test_tensor_cores_at_work_are_compute_though_nothing_is_known_of_the_model():
    seen = short_decode(gpus=(use(tensor_ratio=0.6, sm_ratio=0.9),), **NO_ESTIMATE, **UNKNOWN_MODEL)
    verdict = judge(seen)
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.COMPUTE, "high")
    assert "60% of the tensor cores' time, 10% of the memory's bandwidth" in verdict.summary
