"""The simulated engine's scheduler, step by step."""

from __future__ import annotations

import pytest
from cache_bench import Bench, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.simulated.scheduler import Limits

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
