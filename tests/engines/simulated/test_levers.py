"""Levers move the simulated figures the way they do on a real machine."""

from __future__ import annotations

import random

from cache_bench import Bench, tokens_of

from kvtune.engines.simulated.costs import StepClock, limits_of, plan_capacity
from kvtune.engines.simulated.options import Settings


def capacity_bound_run(**options: object) -> tuple[float, Bench]:
    """Seconds that 60 requests take, 12 at a time, with two shared prefixes in 64 MiB."""
    chosen = Settings(kv_cache_memory_bytes=64 << 20, max_model_len=2048, **options)  # type: ignore[arg-type]
    bench = Bench(plan_capacity(chosen).blocks, chosen.block_size, limits_of(chosen))
    clock = StepClock(chosen)
    numbers = random.Random(3)
    prefixes = [tokens_of(1, 448), tokens_of(2, 448)]
    left = [
        (prefixes[index % 2] + tokens_of(100 + index, numbers.randrange(32, 128)), 64 + index)
        for index in range(60)
    ]
    now_s = 0.0
    while left or not bench.scheduler.is_idle:
        while left and sum(not sequence.done for sequence in bench.sequences) < 12:
            bench.add(*left.pop(0))
        step = bench.scheduler.schedule(now_s)
        now_s += clock.duration_s(step)
        bench.scheduler.complete(step, now_s)
    return now_s, bench


def test_a_run_is_the_same_every_time() -> None:
    first_s, first = capacity_bound_run(simulate_noise=0.1, seed=7)
    again_s, again = capacity_bound_run(simulate_noise=0.1, seed=7)
    other_s, _ = capacity_bound_run(simulate_noise=0.1, seed=8)
    assert first_s == again_s != other_s
    assert [s.last_token_s for s in first.sequences] == [s.last_token_s for s in again.sequences]


def test_smaller_blocks_and_prefix_caching_pay_when_capacity_is_short() -> None:
    stock_s, stock = capacity_bound_run()
    small_s, small = capacity_bound_run(block_size=32)
    bare_s, _ = capacity_bound_run(enable_prefix_caching=False)
    assert stock.scheduler.preemptions > 0
    assert small_s < 0.9 * stock_s < stock_s < 0.8 * bare_s
    assert small.scheduler.prefix_hits_tokens > stock.scheduler.prefix_hits_tokens


def test_eight_bit_kv_gives_room_rather_than_speed() -> None:
    stock_s, stock = capacity_bound_run()
    narrow_s, narrow = capacity_bound_run(kv_cache_dtype="fp8")
    assert narrow.pool.total == 2 * stock.pool.total + 1
    assert narrow.scheduler.preemptions == 0
    assert narrow_s < stock_s
    wide_s, _ = capacity_bound_run(num_gpu_blocks_override=narrow.pool.total)
    assert wide_s < narrow_s
