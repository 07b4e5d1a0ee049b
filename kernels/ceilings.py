"""What the device at hand reaches: memory bandwidth and matrix rate, measured and not looked up.

Read and copy go over buffers far larger than the last-level cache, on all threads at once, as in
STREAM (McCalpin, 1995; https://www.cs.virginia.edu/stream/). A roofline (Williams et al., CACM
52(4), 2009) is drawn with these figures. On Linux numpy asks for huge pages, so a program whose
memory has small pages may not come as close to its ceiling.

Nothing heavy is imported until something is measured. The CUDA path was written against torch's
documentation and is tested on CPU tensors; it has not run on a GPU yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

from kvtune.errors import BadInput, KvtuneError, MissingExtra
from kvtune.kernels.device import cpu_flags
from kvtune.kernels.nvml import GpuSampler
from kvtune.types import Ceilings, Device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Buffer = NDArray[np.int32]

MIB = 1 << 20
CPU_DIRECTORY = Path("/sys/devices/system/cpu")
CGROUP_DIRECTORY = Path("/sys/fs/cgroup")
ROUNDS = 4
FEWEST_PASSES = 2
CACHES_FILLED = 16
FEWEST_CACHES_FILLED = 4
CPU_MATRIX_ROWS = 1024
BFLOAT16_FLAGS = frozenset({"avx512f", "amx_bf16", "bf16"})
"""With any of these features a CPU multiplies bfloat16 at speed; `bf16` is Arm's."""

CUDA_CACHE_BYTES = 128 * MIB  # The largest so far is the 126 MiB of Blackwell.
CUDA_MATRIX_ROWS = 8192
_LOW = "all figures may be low"


@dataclass(frozen=True, slots=True)
class Job:
    """Something to repeat: `run` does one pass over `amount` bytes or FLOP, returns its seconds."""

    amount: float
    run: Callable[[], float]


def measure_ceilings(device: Device, threads: int | None = None, budget_s: float = 3.0) -> Ceilings:
    """Measure what a device reaches, in about `budget_s` seconds and the time to fill buffers.

    Args:
        device: the CPU, or the GPUs of which the first is measured: a figure is that of one GPU.
        threads: how many CPU threads read at once; None is one a usable core. A GPU has none.
        budget_s: seconds of measuring; every kind of pass is made a few times in any case.

    The best pass counts, since what else runs on the machine only slows passes down. The matrix
    rate of a CPU is bfloat16 in torch where torch is installed, float32 on a CPU that has no vector
    instructions for bfloat16 (which then is a hundred times slower), and in numpy.

    Raises:
        BadInput: no thread, or no time.
        MissingExtra: a GPU, and no torch that can use it.
        KvtuneError: too little memory is free for buffers larger than the cache, or the GPU fails.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"{threads} threads cannot read", fix="give 1 or more")
    if budget_s <= 0:
        raise BadInput(f"{budget_s} s is no time to measure in", fix="give more than 0 seconds")
    if device.kind == "cuda":
        return _measure_cuda(device, budget_s)
    return _measure_cpu(device, threads or device.count, budget_s)


def may_be_low(ceilings: Ceilings) -> bool:
    """Whether the device was busy with something else when its ceilings were measured."""
    return _LOW in ceilings.method


def best_rates(
    jobs: Sequence[Job], budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Run the jobs in turns until the budget is spent; returns the best rate of each, per second.

    A job's turn has several passes: the first ones still meet threads of the job before it, which
    spin for a while before they sleep.
    """
    turn_s = budget_s / (ROUNDS * len(jobs))
    fastest_s = [float("inf")] * len(jobs)
    for _ in range(ROUNDS):
        for index, job in enumerate(jobs):
            ends, passes = clock() + turn_s, 0
            while passes < FEWEST_PASSES or clock() < ends:
                fastest_s[index] = min(fastest_s[index], job.run())
                passes += 1
    return [job.amount / seconds for job, seconds in zip(jobs, fastest_s, strict=True)]


def last_level_cache_bytes() -> int:
    """The size of all last-level caches of this machine together; 0 where it is not listed."""
    found: dict[tuple[int, str], int] = {}
    for cache in CPU_DIRECTORY.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            size = (cache / "size").read_text().strip()
            found[level, shared] = int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def buffer_bytes(threads: int, cache_bytes: int, available_bytes: int) -> int:
    """How much each thread reads in a pass: together sixteen times the cache.

    STREAM asks for four times, but a cache that does not replace the oldest line first serves some
    of that: 25% too much was seen at four times 32 MiB, 5% at eight, nothing at sixteen. There are
    two buffers a thread, and all of them take at most a quarter of the available memory.

    Raises:
        KvtuneError: that is less than four times the cache.
    """
    wanted = max(CACHES_FILLED * cache_bytes, 256 * MIB, 16 * MIB * threads)
    taken = min(wanted, available_bytes // 8)
    if taken < max(FEWEST_CACHES_FILLED * cache_bytes, MIB * threads):
        raise KvtuneError(
            f"{available_bytes / MIB:.0f} MiB of free memory are too little to measure bandwidth "
            f"past a cache of up to {cache_bytes / MIB:.0f} MiB",
            fix="free some memory, and measure again",
        )
    return taken // threads // 4096 * 4096


# --- CPU --------------------------------------------------------------------------------------


def _measure_cpu(device: Device, threads: int, budget_s: float) -> Ceilings:
    import numpy as np

    cache_bytes = last_level_cache_bytes()
    each_bytes = buffer_bytes(threads, cache_bytes, _available_bytes())
    busy = os.getloadavg()[0]
    with _Crew(threads, each_bytes) as crew, _cpu_matrix(crew) as (matrix, dtype, library):
        # The maximum of int32 keeps up with memory on every CPU that numpy has SIMD loops for;
        # sums of floats do not.
        read = Job(threads * each_bytes, lambda: crew.timed(lambda one, _: np.maximum.reduce(one)))
        copy = Job(
            2 * threads * each_bytes,
            lambda: crew.timed(lambda one, other: np.copyto(other, one)),
        )
        rates = best_rates([read, copy, matrix], budget_s)
    return _ceilings(
        device,
        rates,
        matrix_dtype=dtype,
        threads=threads,
        method=f"best pass; numpy reads and copies {each_bytes / MIB:.0f} MiB a thread beside "
        f"{cache_bytes / MIB:.0f} MiB of last-level cache; matrix: {CPU_MATRIX_ROWS} rows in "
        f"{library}; load average before: {busy:.1f}"
        f"{f', so that {_LOW}' if busy > threads / 2 else ''}",
    )


class _Crew:
    """Threads that each have a CPU, and a source and a target buffer which they filled themselves.

    Left to the scheduler, two threads that wait for each other may share one CPU while something
    else keeps the other one busy. A page lies in the memory of the processor that first writes it,
    and a page never written is read from one shared page of zeros, which stays in the cache.
    """

    def __init__(self, threads: int, each_bytes: int) -> None:
        self.threads = threads
        self._each_bytes = each_bytes
        self._stack = ExitStack()
        self._workers = [self._stack.enter_context(ThreadPoolExecutor(1)) for _ in range(threads)]
        self._buffers: list[tuple[Buffer, Buffer]] = []

    def __enter__(self) -> _Crew:
        try:
            cpus = sorted(os.sched_getaffinity(0))
            filled = [
                worker.submit(_settle, cpus[number % len(cpus)], self._each_bytes)
                for number, worker in enumerate(self._workers)
            ]
            self._buffers = [future.result() for future in filled]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._buffers.clear()

    def each(self, work: Callable[[], object]) -> None:
        """Let every thread do something."""
        for worker in self._workers:
            worker.submit(work).result()

    def timed(self, work: Callable[[Buffer, Buffer], object]) -> float:
        """Seconds from the start of the first thread to the end of the last one."""
        together = Barrier(self.threads)
        try:
            futures = [
                worker.submit(_span, together, work, *buffers)
                for worker, buffers in zip(self._workers, self._buffers, strict=True)
            ]
            spans = [future.result() for future in futures]
        except BaseException:
            together.abort()  # An interrupt between two submissions would leave threads waiting.
            raise
        return max(end for _, end in spans) - min(start for start, _ in spans)


def _settle(cpu: int, size_bytes: int) -> tuple[Buffer, Buffer]:
    """Stay on one CPU, and fill buffers there."""
    import numpy as np

    os.sched_setaffinity(0, {cpu})  # To Linux, 0 is the calling thread and not the process.
    source = np.arange(size_bytes // 4, dtype=np.int32)
    return source, source.copy()


def _span(
    together: Barrier, work: Callable[[Buffer, Buffer], object], source: Buffer, target: Buffer
) -> tuple[float, float]:
    together.wait()
    start = time.perf_counter()
    work(source, target)
    return start, time.perf_counter()


@contextmanager
def _cpu_matrix(crew: _Crew) -> Iterator[tuple[Job, str, str]]:
    """Matrix products on the CPU, one a thread; their data type, and the library that runs them."""
    try:
        import torch
    except ImportError:
        # BLAS would start its own threads in each of ours.
        yield _numpy_matrix(CPU_MATRIX_ROWS), "float32", "numpy with its own threads"
        return
    before = torch.get_num_threads()
    dtype = torch.bfloat16 if cpu_flags() & BFLOAT16_FLAGS else torch.float32
    left = torch.randn((CPU_MATRIX_ROWS, CPU_MATRIX_ROWS)).to(dtype)
    try:
        crew.each(lambda: torch.set_num_threads(1))
        yield (
            Job(
                2.0 * CPU_MATRIX_ROWS**3 * crew.threads,
                lambda: crew.timed(lambda *_: torch.mm(left, left)),
            ),
            str(dtype).removeprefix("torch."),
            f"torch {torch.__version__}, one product a thread",
        )
    finally:
        torch.set_num_threads(before)


def _numpy_matrix(rows: int) -> Job:
    import numpy as np

    left = np.random.default_rng(0).standard_normal((rows, rows), dtype=np.float32)
    product = np.empty_like(left)
    return Job(2.0 * rows**3, lambda: _wall_time(lambda: np.matmul(left, left, out=product)))


def _wall_time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _available_bytes() -> int:
    """Memory that can be taken without swapping, or being killed for it in a container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP_DIRECTORY / "memory.max").read_text())
        used = int((CGROUP_DIRECTORY / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(limit - used, 0))


# --- CUDA -------------------------------------------------------------------------------------


def _measure_cuda(device: Device, budget_s: float) -> Ceilings:
    torch = _torch_for_cuda()
    free_bytes, _ = torch.cuda.mem_get_info(0)
    size_bytes = buffer_bytes(1, CUDA_CACHE_BYTES, free_bytes)
    with GpuSampler(0.1) as sampler, _saying_what_fails():
        jobs = cuda_jobs(torch, "cuda:0", size_bytes, CUDA_MATRIX_ROWS, _event_time(torch))
        rates = best_rates(jobs, budget_s)
        del jobs
        torch.cuda.empty_cache()
    held_back = sorted({why for sample in sampler.samples for why in sample.slowed_by})
    return _ceilings(
        device,
        rates,
        matrix_dtype="bfloat16",
        threads=None,
        method=f"best pass on one GPU; torch {torch.__version__} sums and copies "
        f"{size_bytes / MIB:.0f} MiB; matrix: {CUDA_MATRIX_ROWS} rows; clocks held back by: "
        f"{', '.join(held_back) or sampler.note or 'nothing'}",
    )


@contextmanager
def _saying_what_fails() -> Iterator[None]:
    """Turn an error of CUDA into one that only ends the measuring."""
    try:
        yield
    except RuntimeError as error:  # Of torch's errors, also those of memory are such ones.
        raise KvtuneError(
            f"the GPU fails ({str(error).partition(chr(10))[0]})",
            fix="measure while nothing else uses it, with a torch that was built for it",
        ) from None


def cuda_jobs(
    torch: Any,
    where: str,
    size_bytes: int,
    rows: int,
    timed: Callable[[Callable[[], object]], float],
) -> list[Job]:
    """Passes that read, copy and multiply on a device of torch; `timed` says how long work takes.

    Read and copy are over float32 tensors of `size_bytes`, the product is of bfloat16 matrices of
    shape (rows, rows).
    """
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=where)
    target = torch.zeros_like(source)
    # Random numbers: products of constants draw less power, and a GPU would clock higher.
    left = torch.randn((rows, rows), dtype=torch.float32, device=where).to(torch.bfloat16)
    product = torch.empty_like(left)
    return [
        Job(size_bytes, lambda: timed(lambda: torch.sum(source))),
        Job(2 * size_bytes, lambda: timed(lambda: target.copy_(source))),
        Job(2.0 * rows**3, lambda: timed(lambda: torch.mm(left, left, out=product))),
    ]


def _torch_for_cuda() -> Any:
    fix = "pip install 'kvtune[reference]' with a torch that was built for CUDA"
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch, which measures a GPU, is not installed", fix=fix) from None
    if not torch.cuda.is_available():
        raise MissingExtra(f"torch {torch.__version__} cannot use the GPU", fix=fix)
    return torch


def _event_time(torch: Any) -> Callable[[Callable[[], object]], float]:
    """A timer of work on the GPU, by its own clock: launching is not counted."""

    def timed(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return timed


def _ceilings(
    device: Device, rates: Sequence[float], *, matrix_dtype: str, threads: int | None, method: str
) -> Ceilings:
    read, copy, matrix = rates
    return Ceilings(
        device=device.key,
        read_bytes_per_s=read,
        copy_bytes_per_s=copy,
        matrix_flop_per_s=matrix,
        matrix_dtype=matrix_dtype,
        threads=threads,
        method=method,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
