"""What a vLLM server really runs with, read back from it; a flag is never taken at its word."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from kvtune.engines.vllm.arguments import normal_name
from kvtune.engines.vllm.cache_info import cache_labels, in_common
from kvtune.engines.vllm.log import plain
from kvtune.policies.plugin_arguments import OPTION, asked_by
from kvtune.policies.plugin_config import SECTION
from kvtune.types import EffectiveConfig

# EffectiveConfig's field -> where /server_info has it.
_SERVER_INFO = {
    "kv_cache_size_tokens": ("cache_config", "kv_cache_size_tokens"),
    "num_gpu_blocks": ("cache_config", "num_gpu_blocks"),
    "block_size_tokens": ("cache_config", "block_size"),
    "kv_cache_max_concurrency": ("cache_config", "kv_cache_max_concurrency"),
    "kv_cache_memory_bytes": ("cache_config", "kv_cache_memory_bytes"),
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "enable_prefix_caching": ("cache_config", "enable_prefix_caching"),
    "prefix_caching_hash_algo": ("cache_config", "prefix_caching_hash_algo"),
    "model_dtype": ("model_config", "dtype"),
    "max_model_len_tokens": ("model_config", "max_model_len"),
    "enforce_eager": ("model_config", "enforce_eager"),
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "max_num_active_seqs": ("scheduler_config", "max_num_active_seqs"),
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "long_prefill_token_threshold_tokens": ("scheduler_config", "long_prefill_token_threshold"),
    "watermark_ratio": ("scheduler_config", "watermark"),
    "scheduler_reserve_full_isl": ("scheduler_config", "scheduler_reserve_full_isl"),
}
_CACHE_CONFIG = {
    label: field for field, (section, label) in _SERVER_INFO.items() if section == "cache_config"
}
_LOG = {
    "attention_backend": r"Using (\w+) (?:attention )?backend\b",
    "engine_version": r"Initializing a V1 LLM engine \(v([^)]+)\)",
    "model_dtype": r"with config: .*\bdtype=([\w.]+)",
    "max_model_len_tokens": r"with config: .*\bmax_seq_len=(\d+)",
    "enforce_eager": r"with config: .*\benforce_eager=(True|False)",
    "kv_cache_size_tokens": r"KV cache size: ([\d,]+) tokens",
    "max_num_batched_tokens": r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)",
}
# Option name -> field whose value must read back as it was passed.
_ARGUMENTS = {
    "attention-backend": "attention_backend",
    "block-size": "block_size_tokens",
    "enable-prefix-caching": "enable_prefix_caching",
    "enforce-eager": "enforce_eager",
    "kv-cache-dtype": "kv_cache_dtype",
    "kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "long-prefill-token-threshold": "long_prefill_token_threshold_tokens",
    "max-model-len": "max_model_len_tokens",
    "max-num-active-seqs": "max_num_active_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "max-num-seqs": "max_num_seqs",
    "num-gpu-blocks-override": "num_gpu_blocks",
    "prefix-caching-hash-algo": "prefix_caching_hash_algo",
    "scheduler-reserve-full-isl": "scheduler_reserve_full_isl",
    "watermark": "watermark_ratio",
}
_PLUGIN = re.compile(r'^kvtune:info\{.*?\bconfig=("(?:[^"\\]|\\.)*")', re.MULTILINE)
_MULTIPLIERS = {
    suffix: multiplier
    for power, letter in enumerate("kmgt", start=1)
    for suffix, multiplier in ((letter, 1000**power), (letter.upper(), 1024**power))
}


def read_effective(
    *,
    server_info: Mapping[str, Any] | None,
    metrics_text: str,
    log_text: str,
    version: str | None,
    start_kind: Literal["cold", "warm", "attached"],
    model: str | None = None,
) -> EffectiveConfig:
    """Put together what the server says in three places; where two say it, the first counts.

    `source` names, in that order, the places that gave at least one value: "server_info",
    "metrics" (the labels of `vllm:cache_config_info`) and "log". What cannot be read is `None`.
    What kvtune's plugin does is what the plugin itself says, not what it was asked to do: a vLLM
    without it takes the same arguments and says nothing.
    Of several engines on the page of metrics those count that serve `model` (see `cache_labels`);
    what is said of caches is then read from there only, because the process that answers for all of
    them speaks of their sum.
    """
    engines = [_readable(_of_labels(labels)) for labels in cache_labels(metrics_text, model)]
    of_metrics, differing = in_common(engines)
    of_server = _readable(_from_server_info(server_info or {}))
    if len(engines) > 1:
        cached = _CACHE_CONFIG.values()
        of_server = {field: value for field, value in of_server.items() if field not in cached}
    found: dict[str, Any] = {}
    sources = []
    for source, values in (
        ("server_info", of_server),
        ("metrics", of_metrics | _readable(_of_plugin(metrics_text))),
        ("log", _readable(_from_log(log_text))),
    ):
        new = {name: value for name, value in values.items() if name not in found}
        if new:
            sources.append(source)
        found.update(new)
    found.update(_readable({"engine_version": version}))
    return EffectiveConfig(
        **found, start_kind=start_kind, source=tuple(sources), differs=differing or None
    )


def _readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that their fields can have; what a server says may be anything."""
    read: dict[str, Any] = {}
    for field, value in values.items():
        with contextlib.suppress(ValidationError):
            read[field] = getattr(EffectiveConfig.model_validate({field: value}), field)
    return {field: value for field, value in read.items() if value is not None}


def _from_server_info(server_info: Mapping[str, Any]) -> dict[str, Any]:
    config = server_info.get("vllm_config")
    if not isinstance(config, Mapping):
        return {}
    values = {
        field: part.get(name)
        for field, (section, name) in _SERVER_INFO.items()
        if isinstance(part := config.get(section), Mapping)
    }
    values["model_dtype"] = _dtype(values.get("model_dtype"))
    cache = config.get("cache_config")
    return _of_real_pool(values, cache if isinstance(cache, Mapping) else {})


def _of_real_pool(values: dict[str, Any], cache_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the pool's bytes where its blocks were counted from something else.

    With `num_gpu_blocks_override` vLLM still tells the bytes that it would have taken.
    """
    if cache_config.get("num_gpu_blocks_override") is not None:
        values.pop("kv_cache_memory_bytes", None)
    return values


def _of_labels(labels: Mapping[str, str]) -> dict[str, Any]:
    labels = {label: value for label, value in labels.items() if value != "None"}
    values = {field: labels[label] for label, field in _CACHE_CONFIG.items() if label in labels}
    if (size_tokens := _size_tokens(labels)) is not None:
        values.setdefault("kv_cache_size_tokens", size_tokens)
    return _of_real_pool(values, labels)


def _of_plugin(metrics_text: str) -> dict[str, Any]:
    """What the plugin says on the server's page of metrics, as JSON in a label."""
    found = _PLUGIN.search(metrics_text)
    with contextlib.suppress(ValueError):
        return {"plugin": json.loads(json.loads(found[1]))} if found else {}
    return {}


def _size_tokens(labels: Mapping[str, str]) -> str | None:
    """What the blocks hold, where the server does not say it: vLLM does from 0.24 on.

    Layers with a window or a state of their own share the blocks in a way that labels don't tell.
    """
    blocks, block_tokens = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if "sliding_window" in labels or "mamba_page_size_padded" in labels:
        return None
    if not (blocks.isdecimal() and block_tokens.isdecimal()):
        return None
    return str(int(blocks) * int(block_tokens))


def _from_log(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, pattern in _LOG.items():
        if found := re.search(pattern, plain(text)):
            values[field] = found[1]
    if "kv_cache_size_tokens" in values:
        values["kv_cache_size_tokens"] = values["kv_cache_size_tokens"].replace(",", "")
    values["model_dtype"] = _dtype(values.get("model_dtype"))
    return values


def _dtype(name: Any) -> str | None:
    return name.removeprefix("torch.") if isinstance(name, str) else None


def differences(
    arguments: Mapping[str, JsonValue], effective: EffectiveConfig, log_text: str
) -> tuple[str, ...]:
    """Say which arguments the engine did not take as they were passed, one warning each."""
    warnings = []
    for name, wanted in arguments.items():
        field = _ARGUMENTS.get(normal_name(name))
        got = getattr(effective, field) if field else None
        if got is not None and not _same(wanted, got):
            warnings.append(
                f"--{normal_name(name)} was passed as {wanted!r}, but the engine runs with {got!r}"
            )
    asked = asked_by({normal_name(name): value for name, value in arguments.items()})
    wanted = asked.model_dump(mode="json", exclude_none=True)
    if asked.is_asked and effective.plugin != wanted:
        does = "is silent" if effective.plugin is None else f"does {json.dumps(effective.plugin)}"
        warnings.append(f"kvtune's plugin was asked for {json.dumps(wanted)}, but {does}")
    if refused := re.search(r"Cannot use (\S+) backend on CPU", log_text):
        backend = refused[1].rpartition(".")[2]
        warnings.append(f"the engine does not use the attention backend {backend} on CPU")
    return tuple(warnings)


def read_back(name: str, effective: EffectiveConfig) -> JsonValue:
    """What the engine says that an option is; `None` where it does not say."""
    field = _ARGUMENTS.get(normal_name(name))
    found: JsonValue = getattr(effective, field) if field else None
    return found


def unread(arguments: Mapping[str, JsonValue], effective: EffectiveConfig) -> dict[str, JsonValue]:
    """The arguments that an effective configuration says nothing of, by their normal names."""
    named = {normal_name(name): value for name, value in arguments.items()}
    return {
        name: value
        for name, value in named.items()
        if (name not in _ARGUMENTS or getattr(effective, _ARGUMENTS[name]) is None)
        and not (effective.plugin is not None and _is_for_plugin(name, value))
    }


def _is_for_plugin(name: str, value: JsonValue) -> bool:
    """Whether an argument is for kvtune's plugin and for nobody else."""
    if name == OPTION:
        return isinstance(value, dict) and set(value) == {SECTION}
    return name.startswith(f"{OPTION}.{SECTION}.")


def _same(wanted: JsonValue, got: Any) -> bool:
    if wanted is None or wanted in ("auto", -1, "-1"):
        return True
    if isinstance(got, str):
        return str(wanted).upper() == got.upper()
    number = number_of(wanted)
    return number is None or number == float(got)


def number_of(value: JsonValue) -> float | None:
    """A number as vLLM reads it: `256M` is 256 * 2**20, `2k` is 2,000."""
    if isinstance(value, int | float):
        return float(value)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value) if isinstance(value, str) else None
    return float(found[1]) * _MULTIPLIERS.get(found[2], 1) if found else None
