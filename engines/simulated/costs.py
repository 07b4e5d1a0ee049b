"""How much fits into the cache, and how long a step takes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvtune.engines.simulated.options import Settings
from kvtune.engines.simulated.scheduler import Limits, Step

GIB = 1 << 30
BLOCK_MULTIPLE_TOKENS = 32
"""What the kernels of vLLM's CPU backend take."""

EAGER_STEP_FACTOR = 1.4
FP8_READ_FACTOR = 1.2
"""Reading a token in 8 bits against 16: half the bytes, and then they have to be converted."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The cache that the settings give. `tokens` counts the block that is never used, as vLLM."""

    blocks: int
    block_tokens: int
    memory_bytes: int
    concurrency: float

    @property
    def tokens(self) -> int:
        """Its size as it is reported."""
        return self.blocks * self.block_tokens


def plan_capacity(settings: Settings) -> Capacity:
    """Size the cache.

    Raises:
        ValueError: not one request of the longest length fits; in vLLM's words.
    """
    memory_bytes = settings.kv_cache_memory_bytes
    if memory_bytes is None:
        whole = int(settings.simulate_memory_bytes * settings.gpu_memory_utilization)
        memory_bytes = whole - settings.simulate_weight_bytes
    page_bytes = settings.kv_bytes_per_token * settings.block_size
    blocks = settings.num_gpu_blocks_override or max(0, memory_bytes // page_bytes)
    longest_blocks = -(-settings.max_model_len // settings.block_size)
    if blocks < 2:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine."
        )
    if longest_blocks > blocks - 1:
        raise ValueError(
            f"To serve at least one request with the model's max seq len "
            f"({settings.max_model_len}), ({longest_blocks * page_bytes / GIB:.2f} GiB KV cache is "
            f"needed, which is larger than the available KV cache memory "
            f"({(blocks - 1) * page_bytes / GIB:.2f} GiB). Based on the available memory, the "
            f"estimated maximum model length is {(blocks - 1) * settings.block_size}. Try "
            f"increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
            f"the engine."
        )
    return Capacity(blocks, settings.block_size, memory_bytes, blocks / longest_blocks)


def refusal(settings: Settings) -> str | None:
    """Why values that each are fine do not go together, in vLLM's words; `None` if they do."""
    budget, width, longest = settings.token_budget, settings.batch_width, settings.max_model_len
    if budget < longest and not settings.enable_chunked_prefill:
        return f"max_num_batched_tokens ({budget}) is smaller than max_model_len ({longest})."
    if budget < width:
        return (
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs "
            f"({width})."
        )
    if settings.active_limit > width:
        return (
            f"max_num_active_seqs ({settings.active_limit}) cannot be greater than max_num_seqs "
            f"({width})."
        )
    if settings.long_prefill_token_threshold > longest:
        return (
            f"long_prefill_token_threshold ({settings.long_prefill_token_threshold}) cannot be "
            f"greater than the max_model_len ({longest})."
        )
    return None


def limits_of(settings: Settings) -> Limits:
    """The scheduler's limits under these settings."""
    return Limits(
        token_budget=settings.token_budget,
        max_active=settings.active_limit,
        long_prefill_tokens=settings.long_prefill_token_threshold,
        long_prefill_adaptive=settings.long_prefill_token_threshold_adaptive,
        chunked_prefill=settings.enable_chunked_prefill,
        reserve_full_prompt=settings.scheduler_reserve_full_isl,
        watermark_ratio=settings.watermark,
        prefix_caching=settings.enable_prefix_caching,
    )


class StepClock:
    """How long steps take: a fixed part, the tokens computed, and the KV read for them.

    Equal seeds and equal steps give equal times.
    """

    def __init__(self, settings: Settings) -> None:
        self._scale = settings.simulate_time_scale
        self._noise = settings.simulate_noise
        self._random = random.Random(settings.seed)
        self._step_s = settings.simulate_step_s
        if settings.enforce_eager:
            self._step_s *= EAGER_STEP_FACTOR
        self._token_s = settings.simulate_token_s
        read_bytes: float = settings.kv_bytes_per_token
        if settings.kv_dtype not in ("bfloat16", "float16", "float32"):
            read_bytes = settings.simulate_kv_bytes_per_token * FP8_READ_FACTOR
        # A speed of 0 switches the cost off rather than dividing by it.
        speed = settings.simulate_kv_bytes_per_s
        self._context_token_s = read_bytes / speed if speed else 0.0

    def duration_s(self, step: Step) -> float:
        """Wall seconds that a step takes, to be asked once and before it is completed."""
        simulated_s = (
            self._step_s + step.tokens * self._token_s + step.context_tokens * self._context_token_s
        )
        if self._noise:
            simulated_s *= max(0.1, self._random.gauss(1.0, self._noise))
        return simulated_s * self._scale
