"""What the simulated server can be told: vLLM's options that matter here, and `simulate-...` ones.

`Settings` is the only list of options: a field is an option, its name with dashes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

KV_DTYPES_8_BIT = ("fp8", "fp8_e4m3", "fp8_e5m2")
KV_DTYPES_BROKEN = (
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4",
    "nvfp4_ds_mla",
    "nvfp4_4over6",
    "int8_per_token_head",
    "int4_per_token_head",
    "fp8_per_token_head",
)
"""Accepted and reported as twice the capacity, like vLLM on a CPU does, but wrong on prompts
longer than a block."""

_SUFFIXES = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def _count(word: str) -> int:
    """Read a whole number as vLLM does: `2k` is 2000, `2K` is 2048."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", word)
    if match is None:
        raise ValueError("a whole number such as 2048, 2k or 64M")
    number = float(match[1]) * _SUFFIXES.get(match[2], 1)
    if number != int(number):
        raise ValueError("a whole number such as 2048, 2k or 64M")
    return int(number)


def _positive(word: str) -> int:
    number = _count(word)
    if number < 1:
        raise ValueError("a whole number of at least 1")
    return number


def _amount(word: str) -> float:
    number = float(word) if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", word) else -1.0
    if number < 0:
        raise ValueError("a number of at least 0")
    return number


def _share(word: str) -> float:
    number = _amount(word)
    if number > 1:
        raise ValueError("a share from 0 to 1")
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return word

    return read


def _option(default: Any, read: Callable[[str], Any], about: str = "") -> Any:
    return field(default=default, metadata={"read": read, "about": about})


def _flag(default: bool, about: str = "") -> Any:
    return field(default=default, metadata={"read": None, "about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All options with their defaults, which are those of vLLM's API server on a CPU.

    `max_num_seqs` and `max_num_batched_tokens` of `None` depend on each other as in vLLM; use
    `batch_width` and `token_budget`.
    """

    model: str = _option("simulated", str)
    served_model_name: str | None = _option(None, str)
    host: str = _option("127.0.0.1", str)
    port: int = _option(8000, _count, "0 takes a free port")
    seed: int = _option(0, _count)

    dtype: str = _option("auto", _one_of("auto", "bfloat16", "float16", "float32"))
    kv_cache_dtype: str = _option(
        "auto",
        _one_of("auto", "bfloat16", "float16", *KV_DTYPES_8_BIT, *KV_DTYPES_BROKEN),
    )
    block_size: int = _option(128, _positive)
    kv_cache_memory_bytes: int | None = _option(None, _positive)
    gpu_memory_utilization: float = _option(0.92, _share)
    num_gpu_blocks_override: int | None = _option(None, _positive)
    enable_prefix_caching: bool = _flag(True)
    prefix_caching_hash_algo: str = _option(
        "sha256", _one_of("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    )
    max_model_len: int = _option(8192, _positive)
    max_num_seqs: int | None = _option(None, _positive)
    max_num_active_seqs: int | None = _option(None, _positive)
    max_num_batched_tokens: int | None = _option(None, _positive)
    enable_chunked_prefill: bool = _flag(True)
    long_prefill_token_threshold: int = _option(0, _count)
    long_prefill_token_threshold_adaptive: bool = _flag(False)
    watermark: float = _option(0.0, _share)
    scheduler_reserve_full_isl: bool = _flag(True)
    enforce_eager: bool = _flag(False)
    enable_mfu_metrics: bool = _flag(False)
    enable_prompt_tokens_details: bool = _flag(False)
    disable_log_stats: bool = _flag(False)

    simulate_time_scale: float = _option(1.0, _amount, "wall seconds a simulated second takes")
    simulate_noise: float = _option(0.0, _share, "relative deviation of a step's time")
    simulate_step_s: float = _option(0.020, _amount, "fixed cost of a step")
    simulate_token_s: float = _option(0.0005, _amount, "cost of computing a token")
    simulate_kv_bytes_per_s: float = _option(6e9, _amount, "speed at which a step reads KV")
    simulate_kv_bytes_per_token: int = _option(23_040, _positive, "in 16 bits")
    simulate_weight_bytes: int = _option(269_000_000, _count)
    simulate_memory_bytes: int = _option(2 << 30, _positive, "memory of the device")

    simulate_slow_start: float = _option(0.0, _amount, "seconds before the server listens")
    simulate_never_ready: bool = _flag(False, "hang before listening")
    simulate_wrong_model: bool = _flag(False, "list another model than was asked for")
    simulate_broken_output: bool = _flag(False, "answer garbage")
    simulate_crash_after_requests: int | None = _option(None, _count, "die while serving")
    simulate_hang_after_requests: int | None = _option(None, _count, "fall silent for good")
    simulate_garbage_after: int | None = _option(None, _count, "stream malformed messages")
    simulate_error_rate: float = _option(0.0, _share, "share of requests that get HTTP 500")

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model

    @property
    def token_budget(self) -> int:
        """Tokens that a step may compute."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        wanted = 2048 if self.enable_chunked_prefill else max(2048, self.max_model_len)
        return min(wanted, (self.max_num_seqs or 128) * self.max_model_len)

    @property
    def batch_width(self) -> int:
        """Sequences that the engine has buffers for."""
        return self.max_num_seqs or min(128, self.token_budget)

    @property
    def active_limit(self) -> int:
        """Sequences that may run at once."""
        return self.max_num_active_seqs or self.batch_width

    @property
    def kv_dtype(self) -> str:
        """The type that KV is stored in; `auto` is the model's."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes a token takes in the cache."""
        if self.kv_dtype == "float32":
            return self.simulate_kv_bytes_per_token * 2
        if self.kv_dtype in ("bfloat16", "float16"):
            return self.simulate_kv_bytes_per_token
        return max(1, self.simulate_kv_bytes_per_token // 2)


def flag_of(name: str) -> str:
    """The option that sets a field of `Settings`."""
    return "--" + name.replace("_", "-")


def parse(words: Sequence[str]) -> tuple[Settings, tuple[str, ...]]:
    """Read command-line words; what is wrong comes back as problems, and keeps its default."""
    options = {flag_of(option.name): option for option in fields(Settings)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        flag, equals, attached = rest.pop(0).partition("=")
        option = options.get(flag)
        negated = options.get("--" + flag.removeprefix("--no-"))
        if option is None and negated is not None and _is_flag(negated):
            values[negated.name] = False
        elif option is None:
            problems.append(f"unrecognized arguments: {flag}{_nearest(flag, options)}")
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif _is_flag(option):
            values[option.name] = True
        elif equals or (rest and not rest[0].startswith("--")):
            word = attached if equals else rest.pop(0)
            try:
                values[option.name] = option.metadata["read"](word)
            except ValueError as error:
                problems.append(f"argument {flag}: {word!r} is not {error}")
        else:
            problems.append(f"argument {flag}: expected one argument")
    return Settings(**values), tuple(problems)


def usage() -> str:
    """All options with their defaults, one a line."""
    lines = []
    for option in fields(Settings):
        about = option.metadata["about"]
        lines.append(f"  {flag_of(option.name)} ({option.default}){about and ': ' + about}")
    return "\n".join(lines)


def _is_flag(option: Field[Any]) -> bool:
    return option.metadata["read"] is None


def _nearest(flag: str, options: Iterable[str]) -> str:
    found = difflib.get_close_matches(flag, options, n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""
