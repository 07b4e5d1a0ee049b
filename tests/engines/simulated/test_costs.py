"""How the simulated engine sizes its cache, refuses, and spends time."""

from __future__ import annotations

import pytest

from kvtune.engines.simulated.blocks import BlockPool
from kvtune.engines.simulated.costs import StepClock, plan_capacity, refusal
from kvtune.engines.simulated.options import Settings, parse
from kvtune.engines.simulated.scheduler import Limits, Scheduler, Sequence, Step

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory_mib", "dtype", "kv_dtype", "blocks"),
    [
        # Read back from vLLM 0.32 on a CPU with a model of 23,040 bytes a token.
        (512, "auto", "auto", 182),
        (256, "auto", "auto", 91),
        (256, "auto", "fp8", 182),
        (256, "float32", "auto", 45),
        (256, "auto", "int8_per_token_head", 182),
        # Worked out: 67,108,864 / (23,040 x 128) = 22.75.
        (64, "auto", "auto", 22),
    ],
)
def test_capacity_is_what_vllm_reports(
    memory_mib: int, dtype: str, kv_dtype: str, blocks: int
) -> None:
    capacity = plan_capacity(
        Settings(
            kv_cache_memory_bytes=memory_mib * MIB,
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            max_model_len=2048,
        )
    )
    assert capacity.blocks == blocks
    assert capacity.tokens == blocks * 128
    assert capacity.concurrency == blocks / 16


def test_64_mib_hold_2816_tokens() -> None:
    assert plan_capacity(Settings(kv_cache_memory_bytes=64 * MIB, max_model_len=512)).tokens == 2816


def test_memory_is_a_share_of_the_device_unless_it_is_given() -> None:
    capacity = plan_capacity(
        Settings(
            simulate_memory_bytes=1000 * MIB,
            simulate_weight_bytes=200 * MIB,
            gpu_memory_utilization=0.5,
        )
    )
    assert capacity.memory_bytes == 300 * MIB


def test_a_request_of_the_longest_length_must_fit_beside_the_reserved_block() -> None:
    assert plan_capacity(Settings(num_gpu_blocks_override=17, max_model_len=2048)).blocks == 17
    with pytest.raises(ValueError, match="estimated maximum model length is 1920"):
        plan_capacity(Settings(num_gpu_blocks_override=16, max_model_len=2048))
    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        plan_capacity(Settings(kv_cache_memory_bytes=MIB))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--max-num-batched-tokens 64", None),
        ("--max-num-batched-tokens 64 --max-num-seqs 65", "greater than or equal to max_num_seqs"),
        ("--max-num-seqs 4 --max-num-active-seqs 5", "cannot be greater than max_num_seqs"),
        ("--max-num-active-seqs 4", None),
        ("--no-enable-chunked-prefill", None),
        (
            "--no-enable-chunked-prefill --max-num-batched-tokens 2048",
            "smaller than max_model_len",
        ),
        (
            "--long-prefill-token-threshold 600 --max-model-len 512",
            "greater than the max_model_len",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(words: str, why: str | None) -> None:
    settings, problems = parse(words.split())
    assert problems == ()
    said = refusal(settings)
    assert said is None if why is None else why in (said or "")


def a_step(settings: Settings, prompt_tokens: int, sequences: int) -> Step:
    scheduler = Scheduler(
        BlockPool(1000, caching=False),
        settings.block_size,
        Limits(token_budget=100_000, max_active=1000, prefix_caching=False),
    )
    for number in range(sequences):
        scheduler.add(Sequence(number, prompt_tokens, 4, []))
    return scheduler.schedule()


def test_a_step_costs_a_fixed_part_its_tokens_and_the_kv_they_read() -> None:
    settings = Settings()
    step = a_step(settings, prompt_tokens=100, sequences=3)
    read_s = 300 * 23_040 / 6e9
    assert StepClock(settings).duration_s(step) == pytest.approx(0.020 + 300 * 0.0005 + read_s)


def test_the_time_scale_shrinks_every_step_alike() -> None:
    step = a_step(Settings(), 50, 2)
    full_s = StepClock(Settings()).duration_s(step)
    assert StepClock(Settings(simulate_time_scale=0.02)).duration_s(step) == pytest.approx(
        full_s * 0.02
    )


def test_noise_has_the_deviation_that_was_asked_for_and_follows_the_seed() -> None:
    step = a_step(Settings(), 50, 2)
    exact_s = StepClock(Settings()).duration_s(step)

    def draws(seed: int) -> list[float]:
        clock = StepClock(Settings(simulate_noise=0.1, seed=seed))
        return [clock.duration_s(step) / exact_s for _ in range(2000)]

    ratios = draws(1)
    mean = sum(ratios) / len(ratios)
    deviation = (sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.02)
    assert deviation == pytest.approx(0.1, rel=0.15)
    assert ratios == draws(1) != draws(2)


def test_running_eagerly_costs_more_a_step() -> None:
    step = a_step(Settings(), 50, 2)
    eager_s = StepClock(Settings(enforce_eager=True)).duration_s(step)
    assert eager_s == pytest.approx(StepClock(Settings()).duration_s(step) + 0.4 * 0.020)
