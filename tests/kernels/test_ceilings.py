import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import BadInput, KvtuneError, MissingExtra
from kvtune.kernels import ceilings
from kvtune.kernels.ceilings import (
    Job,
    best_rates,
    buffer_bytes,
    cuda_jobs,
    last_level_cache_bytes,
    may_be_low,
    measure_ceilings,
)
from kvtune.types import Device

MIB = 1 << 20
CPU = Device(kind="cpu", name="Example CPU", count=2, memory_bytes=8 << 30)
GPU = Device(kind="cuda", name="Example GPU", count=1, memory_bytes=80 << 30)


@pytest.fixture
def small(monkeypatch):
    """Buffers of 1 MiB a thread: what is measured is a cache, and fast."""
    monkeypatch.setattr(ceilings, "buffer_bytes", lambda threads, cache, free: MIB)


class Clock:
    """Time that passes only when a job runs."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def job(self, name, amount, durations):
        left = list(durations)

        def run():
            seconds = left.pop(0) if len(left) > 1 else left[0]
            self.log.append(name)
            self.now += seconds
            return seconds

        return Job(amount, run)


def test_the_best_pass_counts():
    clock = Clock()
    jobs = [clock.job("read", 100.0, [5.0, 0.5, 2.0]), clock.job("copy", 30.0, [3.0, 10.0])]
    assert best_rates(jobs, 1.0, clock) == [200.0, 10.0]


def test_jobs_take_turns_of_several_passes():
    clock = Clock()
    best_rates([clock.job("a", 1.0, [100.0]), clock.job("b", 1.0, [100.0])], 0.001, clock)
    assert clock.log == ["a", "a", "b", "b"] * ceilings.ROUNDS


@settings(deadline=None)
@given(
    st.floats(0.01, 4.0),
    st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3),
)
def test_the_budget_is_kept_but_for_the_fewest_passes(budget_s, durations):
    clock = Clock()
    best_rates([clock.job(str(d), 1.0, [d]) for d in durations], budget_s, clock)
    assert clock.now >= budget_s * (1 - 1e-9)
    fewest_s = ceilings.ROUNDS * ceilings.FEWEST_PASSES * sum(durations)
    assert clock.now <= budget_s + fewest_s


def test_a_cpu_is_measured_with_the_threads_that_were_asked_for(small):
    found = measure_ceilings(CPU, threads=2, budget_s=0.01)
    assert found.device == CPU.key == "cpu:Example CPU:2"
    assert found.threads == 2
    assert min(found.read_bytes_per_s, found.copy_bytes_per_s, found.matrix_flop_per_s) > 1e6
    assert "1 MiB a thread" in found.method
    assert "load average" in found.method
    assert found.measured_at[:2] == "20"


@pytest.mark.parametrize(("load", "low"), [(0.9, False), (1.1, True)])
def test_a_busy_machine_is_said_to_measure_low(small, monkeypatch, load, low):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    found = measure_ceilings(CPU, threads=2, budget_s=0.01)
    assert f"load average before: {load}" in found.method
    assert ("may be low" in found.method) is may_be_low(found) is low


def test_every_usable_core_reads_when_no_number_is_given(small):
    assert measure_ceilings(CPU, budget_s=0.01).threads == CPU.count


def test_threads_stay_on_cpus_of_their_own_and_the_caller_keeps_all():
    usable = os.sched_getaffinity(0)
    seen = []
    with ceilings._Crew(len(usable) + 1, 4096) as crew:
        crew.each(lambda: seen.append(os.sched_getaffinity(0)))
    assert all(len(cpus) == 1 for cpus in seen)
    assert set().union(*seen) == usable == os.sched_getaffinity(0)


def test_an_error_in_a_thread_comes_through_and_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), ceilings._Crew(2, 4096) as crew:
        crew.timed(lambda *_: 1 / 0)
    assert threading.active_count() == before


def test_all_threads_work_at_once_on_buffers_of_their_own():
    together = threading.Barrier(3)
    seen = []

    def work(source, target):
        together.wait(timeout=20)  # Breaks unless all three are here at the same time.
        seen.append((source.copy(), target.copy(), id(source)))

    with ceilings._Crew(3, 4096) as crew:
        seconds = crew.timed(work)
    assert seconds > 0
    assert len({identity for *_, identity in seen}) == 3
    for source, target, _ in seen:
        assert source.nbytes == 4096
        assert np.unique(source).size == 1024, "pages of zeros would be read from the cache"
        assert (target == source).all()


def test_bytes_are_counted_once_for_reads_and_twice_for_copies(small, monkeypatch):
    pytest.importorskip("torch")
    amounts = []
    monkeypatch.setattr(
        ceilings,
        "best_rates",
        lambda jobs, _: amounts.extend(job.amount for job in jobs) or [1] * 3,
    )
    measure_ceilings(CPU, threads=2)
    read, copy, matrix = amounts
    assert (read, copy) == (2 * MIB, 4 * MIB)
    assert matrix == 2 * (2 * 1024**3), "one product a thread"


def test_without_torch_the_matrix_rate_is_float32(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = measure_ceilings(CPU, threads=1, budget_s=0.01)
    assert found.matrix_dtype == "float32"
    assert "numpy with its own threads" in found.method
    assert found.matrix_flop_per_s > 1e6


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx2", "avx512f"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
        ({"avx2", "f16c"}, "float32"),
    ],
)
def test_torch_measures_the_fast_format_of_the_cpu_and_keeps_its_threads(
    small, monkeypatch, flags, dtype
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(ceilings, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(ceilings, "CPU_MATRIX_ROWS", 64)
    before = torch.get_num_threads()
    found = measure_ceilings(CPU, threads=before + 1, budget_s=0.01)
    assert found.matrix_dtype == dtype
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"threads": -1}, {"budget_s": 0.0}])
def test_no_threads_and_no_time_are_refused(arguments):
    with pytest.raises(BadInput):
        measure_ceilings(CPU, **arguments)


# --- buffers ---


@given(
    threads=st.integers(1, 512),
    cache=st.integers(0, 1 << 30),
    free=st.integers(0, 1 << 40),
)
def test_buffers_overflow_the_cache_and_fit_a_quarter_of_free_memory(threads, cache, free):
    if free // 8 < max(4 * cache, MIB * threads):
        with pytest.raises(KvtuneError, match="too little"):
            buffer_bytes(threads, cache, free)
        return
    each = buffer_bytes(threads, cache, free)
    assert each % 4096 == 0
    assert 2 * each * threads <= free // 4
    assert each * threads > 4 * cache - 4096 * threads


def test_buffers_are_sixteen_times_the_cache_where_memory_allows():
    # 16 x 384 MiB over 96 threads; 16 x 32 MiB over 2; at least 256 MiB in all.
    assert buffer_bytes(96, 384 * MIB, 1 << 40) == 64 * MIB
    assert buffer_bytes(2, 32 * MIB, 1 << 40) == 256 * MIB
    assert buffer_bytes(2, 0, 1 << 40) == 128 * MIB
    assert buffer_bytes(2, 32 * MIB, 2 << 30) == 128 * MIB, "an eighth of what is free"


def test_caches_of_the_last_level_are_summed_once_each(monkeypatch, tmp_path):
    # Four CPUs: a second level each, and a third level shared by pairs.
    for cpu in range(4):
        for index, (level, shared, size) in enumerate(
            [
                ("1", str(cpu), "32K"),
                ("2", str(cpu), "1024K"),
                ("3", ("0-1", "2-3")[cpu // 2], "16384K"),
            ]
        ):
            directory = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            directory.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (directory / name).write_text(text + "\n")
    monkeypatch.setattr(ceilings, "CPU_DIRECTORY", tmp_path)
    assert last_level_cache_bytes() == 2 * 16 * MIB


def test_a_machine_that_lists_no_caches_has_an_unknown_one(monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "CPU_DIRECTORY", tmp_path / "absent")
    assert last_level_cache_bytes() == 0


@pytest.mark.parametrize(
    ("limit", "left"), [("2048", 1024), ("max", None), ("512", 0), (None, None)]
)
def test_memory_of_a_container_is_limited_by_its_group(monkeypatch, tmp_path, limit, left):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1024\n")
    monkeypatch.setattr(ceilings, "CGROUP_DIRECTORY", tmp_path)
    found = ceilings._available_bytes()
    assert found == left if left is not None else found > MIB


# --- CUDA ---


def test_a_gpu_needs_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch, which measures a GPU") as caught:
        measure_ceilings(GPU)
    assert "kvtune[reference]" in caught.value.fix


def test_a_torch_that_was_built_without_cuda_is_named(monkeypatch):
    torch = SimpleNamespace(
        __version__="2.13.0+cpu", cuda=SimpleNamespace(is_available=lambda: False)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(MissingExtra, match=r"torch 2\.13\.0\+cpu cannot use the GPU"):
        measure_ceilings(GPU)


def test_the_passes_of_a_gpu_run_on_tensors_of_any_device():
    torch = pytest.importorskip("torch")
    done = []

    def timed(work):
        done.append(work())
        return 0.5

    read, copy, matrix = cuda_jobs(torch, "cpu", 4096, 64, timed)
    assert (read.amount, copy.amount, matrix.amount) == (4096, 8192, 2 * 64**3)
    assert [job.run() for job in (read, copy, matrix)] == [0.5] * 3
    total, copied, product = done
    assert total == 1024
    assert (copied == 1).all()
    assert product.shape == (64, 64)
    assert product.dtype == torch.bfloat16


def test_a_gpu_is_timed_by_its_events_and_what_held_it_back_is_said(monkeypatch):
    torch = pytest.importorskip("torch")
    events = []

    class Event:
        """Stands in for torch.cuda.Event: every pass takes 2 ms."""

        def __init__(self, enable_timing):
            assert enable_timing
            events.append(self)
            self.done = []

        def record(self):
            self.done.append("record")

        def synchronize(self):
            self.done.append("synchronize")

        def elapsed_time(self, end):
            assert (self.done, end.done) == (["record"], ["record", "synchronize"])
            return 2.0

    fake = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("ones", "zeros_like", "sum", "randn")},
        **{name: getattr(torch, name) for name in ("mm", "empty_like", "float32", "bfloat16")},
        __version__="2.13.0",
        cuda=SimpleNamespace(
            is_available=lambda: True,
            mem_get_info=lambda _: (64 << 30, 80 << 30),
            Event=Event,
            empty_cache=lambda: None,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(
        ceilings,
        "cuda_jobs",
        lambda torch, where, size, rows, timed: cuda_jobs(torch, "cpu", 4096, 16, timed),
    )
    found = measure_ceilings(GPU, budget_s=0.01)
    assert found.read_bytes_per_s == pytest.approx(4096 / 0.002)
    assert found.copy_bytes_per_s == pytest.approx(2 * 4096 / 0.002)
    assert found.matrix_flop_per_s == pytest.approx(2 * 16**3 / 0.002)
    assert (found.device, found.threads) == (GPU.key, None)
    assert "clocks held back by: " in found.method
    assert events


def test_a_full_gpu_is_not_measured():
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    torch.cuda.mem_get_info = lambda _: (1 << 30, 80 << 30)
    torch.__version__ = "2.13.0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        with pytest.raises(KvtuneError, match="1024 MiB of free memory are too little"):
            measure_ceilings(GPU)


def test_a_gpu_that_fails_ends_only_the_measuring(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with more")

    fake = SimpleNamespace(
        __version__="2.13.0",
        float32=None,
        ones=fail,
        cuda=SimpleNamespace(
            is_available=lambda: True, mem_get_info=lambda _: (64 << 30, 80 << 30)
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(KvtuneError) as caught:
        measure_ceilings(GPU)
    assert caught.value.message == "the GPU fails (CUDA error: no kernel image is available)"
    assert caught.value.fix


def test_importing_it_is_light():
    code = (
        "import sys, kvtune.kernels.ceilings\n"
        "print(sorted({'torch', 'numpy', 'pynvml', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
