"""What a page of metrics says of KV caches: a line of `vllm:cache_config_info` for each engine.

Several engines may lie behind one address: the ranks of a data-parallel server, or servers whose
pages a gateway puts into one. What is told here is of one engine, as everything else is that is
known of a configuration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_SERIES = re.compile(r"^vllm:(cache_config_info|num_requests_running)\{(.*)\}[ \t]", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

SIZES = frozenset(
    {
        "kv_cache_max_concurrency",
        "kv_cache_memory_bytes",
        "kv_cache_size_tokens",
        "num_gpu_blocks",
    }
)
"""Fields of `EffectiveConfig` of which the smallest counts where engines differ: devices have
unlike amounts of memory free, and where there is least a request first finds no room."""


def cache_labels(text: str, model: str | None = None) -> list[dict[str, str]]:
    """The labels of `vllm:cache_config_info` of every engine that serves `model`, by name.

    The series does not name its model. The gauge of running requests does, and tells by the labels
    that both have which engines are meant. All of them are where nobody knows better: without
    `model`, or on a page that does not name it. `num_gpu_blocks` is that of one engine, if vLLM
    tells the sum over its engines in the line of each.
    """
    infos: list[dict[str, str]] = []
    running: list[dict[str, str]] = []
    for name, labels in dict.fromkeys(_SERIES.findall(text)):
        (running if name == "num_requests_running" else infos).append(dict(_LABEL.findall(labels)))
    ours = [labels for labels in running if model is not None and labels.get("model_name") == model]
    if ours:
        infos = [info for info in infos if any(_are_of_one(info, labels) for labels in ours)]
    servers = Counter(map(_server, infos))
    return [_of_one_engine(info, servers[_server(info)]) for info in infos]


def in_common(engines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What holds of all `engines`, as values by field, and in words the fields that differ.

    Of `SIZES` the smallest is taken; other fields that differ are left out.
    """
    common: dict[str, Any] = {}
    differing = []
    for field in sorted({name for engine in engines for name in engine}):
        told = [engine[field] for engine in engines if field in engine]
        is_same = len(told) == len(engines) and all(value == told[0] for value in told)
        if not is_same:
            values = sorted({str(engine.get(field, "unknown")) for engine in engines})
            differing.append(f"{field} ({', '.join(values)})")
        if is_same or field in SIZES:
            common[field] = min(told)
    return common, tuple(differing)


def _are_of_one(info: Mapping[str, str], running: Mapping[str, str]) -> bool:
    return all(info[label] == value for label, value in running.items() if label in info)


def _server(info: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Engines of one server print the same line but for their number."""
    return frozenset((label, value) for label, value in info.items() if label != "engine")


def _of_one_engine(info: dict[str, str], engines: int) -> dict[str, str]:
    blocks = info.get("num_gpu_blocks", "")
    if engines == 1 or not blocks.isdecimal():
        return info
    return {**info, "num_gpu_blocks": str(int(blocks) // engines)}
