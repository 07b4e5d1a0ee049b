"""The simulated engine's cache and scheduler, without processes or clocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.simulated.blocks import BlockPool, prefix_hashes
from kvtune.engines.simulated.costs import StepClock, limits_of, plan_capacity
from kvtune.engines.simulated.options import Settings
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence

WIDE = Limits(token_budget=2048, max_active=64)


class Bench:
    """A scheduler with a pool, and what a test wants to ask of the two."""

    def __init__(self, blocks: int, block_tokens: int, limits: Limits = WIDE) -> None:
        self.block_tokens = block_tokens
        self.pool = BlockPool(blocks, caching=limits.prefix_caching)
        self.scheduler = Scheduler(self.pool, block_tokens, limits)
        self.sequences: list[Sequence] = []
        self.steps = 0

    def add(self, prompt: list[int], output_tokens: int, salt: str | None = None) -> Sequence:
        sequence = Sequence(
            number=len(self.sequences) + 1,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            hashes=prefix_hashes(prompt, self.block_tokens, salt),
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """Run a step; return each number with the tokens it computed."""
        step = self.scheduler.schedule(float(self.steps))
        self.steps += 1
        self.scheduler.complete(step, float(self.steps))
        return [(sequence.number, tokens) for sequence, tokens in step.chunks]

    def run(self, limit: int = 100_000) -> None:
        while not self.scheduler.is_idle:
            self.step()
            assert self.steps < limit, "a request starves"

    def check_blocks(self) -> None:
        held = {block for sequence in self.sequences for block in sequence.blocks}
        assert 0 not in held
        assert self.pool.used == len(held)
        assert self.pool.free + self.pool.used == self.pool.total - 1


def tokens_of(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(40_000) for _ in range(count)]


# --- properties ---

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which shared prefix
        st.integers(0, 60),  # tokens of it
        st.integers(1, 60),  # tokens of its own
        st.integers(1, 40),  # output
        st.integers(0, 6),  # steps before it arrives
    ),
    min_size=1,
    max_size=12,
)
LIMITS = st.builds(
    Limits,
    token_budget=st.integers(1, 200),
    max_active=st.integers(1, 8),
    long_prefill_tokens=st.sampled_from([0, 7, 32]),
    long_prefill_adaptive=st.booleans(),
    reserve_full_prompt=st.booleans(),
    watermark_ratio=st.sampled_from([0.0, 0.1, 0.6]),
    prefix_caching=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    limits=LIMITS,
    block_tokens=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 40),
    dropped=st.sets(st.integers(0, 11), max_size=3),
)
def test_blocks_are_conserved_and_every_request_that_fits_is_served(
    requests: list[tuple[int, int, int, int, int]],
    limits: Limits,
    block_tokens: int,
    spare_blocks: int,
    dropped: set[int],
) -> None:
    longest = max(shared + own + output for _, shared, own, output, _ in requests)
    bench = Bench(-(-longest // block_tokens) + 1 + spare_blocks, block_tokens, limits)
    for index, (prefix, shared, own, output, delay) in enumerate(requests):
        for _ in range(delay):
            chunks = bench.step()
            assert sum(tokens for _, tokens in chunks) <= limits.token_budget
            assert len(bench.scheduler.running) <= limits.max_active
            bench.check_blocks()
        prompt = tokens_of(prefix, 60)[:shared] + tokens_of(1000 + index, own)
        bench.add(prompt, output)
    for index in dropped & set(range(len(requests))):
        bench.scheduler.drop(bench.sequences[index])
        bench.check_blocks()
    while not bench.scheduler.is_idle:
        bench.step()
        bench.check_blocks()
        assert bench.steps < 50_000, "a request starves"
    assert bench.pool.used == 0
    for index, sequence in enumerate(bench.sequences):
        assert sequence.done
        if index not in dropped:
            assert sequence.generated_tokens == sequence.output_tokens
    assert bench.scheduler.preemptions == sum(s.preemptions for s in bench.sequences)


@given(
    tokens=st.lists(st.integers(0, 5), max_size=50),
    other=st.lists(st.integers(0, 5), max_size=50),
    block_tokens=st.integers(1, 8),
)
def test_block_hashes_agree_exactly_as_far_as_the_tokens_do(
    tokens: list[int], other: list[int], block_tokens: int
) -> None:
    ours, theirs = prefix_hashes(tokens, block_tokens), prefix_hashes(other, block_tokens)
    assert len(ours) == len(tokens) // block_tokens
    for index, (mine, yours) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_tokens
        assert (mine == yours) == (tokens[:end] == other[:end])


# --- prefix cache ---


def test_identical_prompts_of_48_tokens_share_32_in_blocks_of_16() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    first = bench.add(prompt, 1)
    bench.run()
    second = bench.add(prompt, 1)
    bench.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert bench.scheduler.prefix_queries_tokens == 96
    assert bench.scheduler.prefix_hits_tokens == 32


def test_a_prefix_is_shared_by_requests_admitted_in_the_same_step() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 5)
    bench.add(prompt, 5)
    assert bench.step() == [(1, 48), (2, 16)]
    assert bench.pool.used == 4  # two shared, and the last block of each


def test_prompts_that_differ_in_their_first_token_share_nothing() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 1)
    bench.run()
    other = bench.add([prompt[0] + 1, *prompt[1:]], 1)
    bench.run()
    assert other.cached_tokens == 0


def test_another_salt_does_not_find_the_prefix() -> None:
    bench = Bench(20, 16)
    prompt = tokens_of(1, 48)
    bench.add(prompt, 1, salt="a")
    bench.run()
    assert bench.pool.find(prefix_hashes(prompt, 16, "b")) == []
    assert len(bench.pool.find(prefix_hashes(prompt, 16, "a"))) == 3


def test_nothing_is_found_without_prefix_caching() -> None:
    bench = Bench(20, 16, Limits(token_budget=2048, max_active=8, prefix_caching=False))
    bench.add(tokens_of(1, 48), 1)
    bench.run()
    second = bench.add(tokens_of(1, 48), 1)
    bench.run()
    assert second.cached_tokens == 0
    assert bench.scheduler.prefix_queries_tokens == 0


def test_the_end_of_the_prompt_released_longest_ago_is_reused_first() -> None:
    pool = BlockPool(6, caching=True)
    old, new = pool.take(2), pool.take(2)
    for block, value in zip(old + new, (10, 11, 20, 21), strict=True):
        pool.remember(block, value)
    pool.release(old)
    pool.release(new)
    pool.take(1)  # the block that was never used goes first
    assert pool.find([10, 11]) == old
    pool.take(1)
    assert pool.find([10, 11]) == old[:1]
    pool.take(1)
    assert pool.find([10, 11]) == []
    assert pool.find([20, 21]) == new


def test_a_prefix_that_is_used_again_outlives_one_that_is_not() -> None:
    pool = BlockPool(3, caching=True)
    first, second = pool.take(1), pool.take(1)
    pool.remember(first[0], 1)
    pool.remember(second[0], 2)
    pool.release(first)
    pool.release(second)
    pool.hold(pool.find([1]))
    pool.release(first)
    pool.take(1)
    assert pool.find([1]) == first
    assert pool.find([2]) == []


def test_blocks_that_nobody_could_find_are_reused_before_those_that_hold_a_prefix() -> None:
    pool = BlockPool(4, caching=True)
    known, unknown, _ = pool.take(3)
    pool.remember(known, 1)
    pool.release([known])
    pool.release([unknown])
    assert pool.take(1) == [unknown]


def test_the_cache_is_not_reset_while_blocks_are_held() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.take(1)
    pool.remember(blocks[0], 7)
    assert not pool.reset_cache()
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.find([7]) == []
    assert pool.free == 3


# --- scheduling ---


def test_running_out_of_blocks_preempts_the_latest_request_once() -> None:
    # Four usable blocks of 16: both prompts fill one, both outputs reach into the second, and the
    # third block of either one (its 33rd token) is one too many.
    bench = Bench(5, 16)
    first, second = bench.add(tokens_of(1, 16), 40), bench.add(tokens_of(2, 16), 40)
    for _ in range(17):
        assert len(bench.step()) == 2
    assert bench.scheduler.preemptions == 0
    assert bench.step() == [(1, 1)]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.generated_tokens == 17  # what was said stays said
    assert second.computed_tokens == 0
    bench.run()
    assert bench.scheduler.preemptions == 1
    assert second.generated_tokens == 40


def test_a_preempted_request_comes_back_before_those_that_wait() -> None:
    bench = Bench(5, 16, Limits(token_budget=2048, max_active=2))
    for seed in (1, 2, 3):
        bench.add(tokens_of(seed, 16), 40)
    while bench.scheduler.preemptions == 0:
        bench.step()
    assert [sequence.number for sequence in bench.scheduler.waiting][:2] == [2, 3]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    # Seven usable blocks are full when the second request's 81st token needs one more. What it
    # gives back would be room for its first chunk, at once.
    limits = Limits(token_budget=32, max_active=8, reserve_full_prompt=False, prefix_caching=False)
    bench = Bench(8, 16, limits)
    bench.add(tokens_of(1, 16), 32)
    bench.add(tokens_of(2, 70), 40)
    while bench.scheduler.preemptions == 0:
        chunks = bench.step()
    assert chunks == [(1, 1)]
    assert bench.step() == [(1, 1), (2, 31)]


def test_a_preempted_request_recomputes_what_it_had_said() -> None:
    limits = Limits(token_budget=2048, max_active=8, prefix_caching=False)
    bench = Bench(5, 16, limits)
    bench.add(tokens_of(1, 16), 40)
    bench.add(tokens_of(2, 16), 40)
    while bench.scheduler.preemptions == 0:
        bench.step()
    while (chunks := bench.step()) and chunks[0][0] == 1:
        pass
    assert chunks == [(2, 16 + 17)]


def test_the_queries_of_a_preempted_request_are_not_counted_twice() -> None:
    bench = Bench(5, 16)
    bench.add(tokens_of(1, 16), 40)
    bench.add(tokens_of(2, 16), 40)
    bench.run()
    assert bench.scheduler.preemptions == 1
    assert bench.scheduler.prefix_queries_tokens == 32


def test_a_step_mixes_decoding_with_as_much_prefill_as_its_budget_leaves() -> None:
    bench = Bench(100, 16, Limits(token_budget=50, max_active=8))
    bench.add(tokens_of(1, 20), 10)
    assert bench.step() == [(1, 20)]
    bench.add(tokens_of(2, 120), 10)
    assert bench.step() == [(1, 1), (2, 49)]
    assert bench.step() == [(1, 1), (2, 49)]
    assert bench.step() == [(1, 1), (2, 22)]
    assert bench.step() == [(1, 1), (2, 1)]


def test_a_long_prompt_is_cut_shorter_only_while_others_are_there() -> None:
    limits = Limits(token_budget=100, max_active=8, long_prefill_tokens=20)
    alone = Bench(100, 16, limits)
    alone.add(tokens_of(1, 90), 1)
    assert alone.step() == [(1, 90)]
    together = Bench(100, 16, limits)
    together.add(tokens_of(1, 60), 1)
    together.add(tokens_of(2, 60), 1)
    assert together.step() == [(1, 20), (2, 20)]


def test_the_adaptive_threshold_never_cuts_below_a_fair_share() -> None:
    limits = Limits(
        token_budget=100, max_active=8, long_prefill_tokens=20, long_prefill_adaptive=True
    )
    bench = Bench(100, 16, limits)
    bench.add(tokens_of(1, 60), 1)
    bench.add(tokens_of(2, 60), 1)
    assert bench.step() == [(1, 50), (2, 50)]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget() -> None:
    bench = Bench(100, 16, Limits(token_budget=100, max_active=8, chunked_prefill=False))
    bench.add(tokens_of(1, 60), 1)
    bench.add(tokens_of(2, 60), 1)
    assert bench.step() == [(1, 60)]
    assert bench.step() == [(2, 60)]


def test_no_more_than_the_active_limit_run_and_the_rest_wait_in_order() -> None:
    bench = Bench(100, 16, Limits(token_budget=500, max_active=2))
    for number in range(4):
        bench.add(tokens_of(number, 10), 2)
    bench.step()
    assert [sequence.number for sequence in bench.scheduler.running] == [1, 2]
    assert [sequence.number for sequence in bench.scheduler.waiting] == [3, 4]


@pytest.mark.parametrize(("reserve", "admitted"), [(True, [1]), (False, [1, 2])])
def test_reserving_the_whole_prompt_keeps_out_what_would_not_fit(
    reserve: bool, admitted: list[int]
) -> None:
    limits = Limits(token_budget=32, max_active=8, reserve_full_prompt=reserve)
    bench = Bench(9, 16, limits)
    bench.add(tokens_of(1, 16), 50)
    bench.add(tokens_of(2, 120), 1)
    bench.step()
    assert [sequence.number for sequence in bench.scheduler.running] == admitted


@pytest.mark.parametrize(("watermark", "running"), [(0.0, 2), (0.3, 1)])
def test_the_watermark_keeps_blocks_free_at_admission(watermark: float, running: int) -> None:
    limits = Limits(token_budget=500, max_active=8, watermark_ratio=watermark)
    bench = Bench(11, 16, limits)
    bench.add(tokens_of(1, 64), 5)
    bench.add(tokens_of(2, 64), 5)
    bench.step()
    assert len(bench.scheduler.running) == running


def test_the_watermark_never_keeps_out_a_lone_request() -> None:
    bench = Bench(11, 16, Limits(token_budget=500, max_active=8, watermark_ratio=0.9))
    bench.add(tokens_of(1, 150), 5)
    bench.run()


def test_dropping_a_request_frees_its_blocks_in_every_state() -> None:
    bench = Bench(6, 16)
    running, waiting = bench.add(tokens_of(1, 60), 9), bench.add(tokens_of(2, 60), 9)
    step = bench.scheduler.schedule()
    bench.scheduler.drop(running)  # in the middle of a step
    bench.scheduler.drop(waiting)
    bench.scheduler.drop(running)
    assert bench.scheduler.complete(step, 1.0) == []
    assert bench.scheduler.is_idle
    assert bench.pool.used == 0


# --- what the model is for: levers move the figures the way they do on a real machine ---


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
