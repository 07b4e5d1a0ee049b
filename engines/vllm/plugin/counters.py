"""What the plugin counts in the processes that attend and schedule.

    counters().add("pages_read", 8)

Each process has files of its own, mapped into memory, so that an `add` is one store of eight bytes:
no lock, no call to the system. They are written as those of prometheus_client's multi-process mode
(described in its `mmap_dict.py`), which vLLM reads by itself where several API servers answer;
elsewhere `collector` reads them. Standard library only.
"""

from __future__ import annotations

import json
import logging
import mmap
import multiprocessing
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtune.engines.vllm.plugin import metrics_folder

PREFIX = "kvtune:"
MODEL = "KVTUNE_METRICS_MODEL"
"""A variable that holds the name under which a model is served, for the processes of its server."""

_SIZE_BYTES = 1 << 16
_logger = logging.getLogger("vllm.kvtune")


@dataclass(frozen=True, slots=True)
class Metric:
    """What a figure is. A counter only grows; of a gauge, `sum` or `max` of its processes tells.

    `labels` are in the order in which they are given.
    """

    kind: Literal["counter", "gauge_sum", "gauge_max"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "info": Metric(
        "gauge_max",
        "What the plugin was asked to do, as labels.",
        ("policies", "config", "fingerprint", "kvtune", "vllm"),
    ),
    "pages_seen": Metric(
        "counter", "Pages that decode steps would have read without the plugin, of all layers."
    ),
    "pages_read": Metric("counter", "Pages that decode steps read, of all layers."),
    "evicted_tokens": Metric("counter", "Tokens whose KV was dropped.", ("cause",)),
    "span_tokens": Metric(
        "counter",
        "Tokens of ended requests' prompts: of the protected prefix, marked, or the rest.",
        ("span", "kept"),
    ),
    "kv_bytes_stored": Metric("counter", "Bytes written to the KV cache."),
    "kv_bytes_read": Metric("counter", "Bytes of the KV cache that steps read."),
    "open_page_bytes": Metric(
        "gauge_sum", "Bytes beside the cache for pages that a store has not quantized yet."
    ),
    "early_pages": Metric(
        "counter", "Pages that a store quantized before they were full, and that went on filling."
    ),
    "summary_bytes": Metric("gauge_sum", "Bytes that summaries of pages take beside the cache."),
    "tier_bytes": Metric(
        "counter", "Bytes moved to a tier (store) or back from it (load).", ("tier", "direction")
    ),
    "tier_seconds": Metric(
        "counter", "Seconds in which the bytes of kvtune:tier_bytes moved.", ("tier", "direction")
    ),
    "tier_failures": Metric(
        "counter", "Pages that could not be moved to a tier or back.", ("tier", "direction")
    ),
    "tier_held_bytes": Metric("gauge_sum", "Bytes that are kept in a tier.", ("tier",)),
}
"""Each name, without the prefix and without the `_total` of counters."""


class Counters:
    """The figures of one process, which one thread of it writes.

    `labels` are put to each: those by which vLLM tells engines and models apart.
    """

    def __init__(self, folder: Path | None, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._places: dict[object, tuple[memoryview[float], int]] = {}

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Let a figure grow; by 0 it exists.

        Raises:
            KeyError: there is no metric of this name.
            ValueError: its labels are others.
        """
        values, index = self._place(name, labels)
        values[index] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Let a gauge be `value`; raises as `add` does."""
        values, index = self._place(name, labels)
        values[index] = value

    def get(self, name: str, **labels: str) -> float:
        """What this process wrote; raises as `add` does."""
        values, index = self._place(name, labels)
        return values[index]

    def _place(self, name: str, labels: dict[str, str]) -> tuple[memoryview[float], int]:
        key = (name, *labels.values()) if labels else name
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._make(name, labels)
        return found

    def _make(self, name: str, labels: dict[str, str]) -> tuple[memoryview[float], int]:
        metric = METRICS[name]
        if tuple(labels) != metric.labels:
            raise ValueError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
        file = self._files.get(metric.kind)
        if file is None:
            file = self._files[metric.kind] = self._open(metric.kind)
        family = PREFIX + name
        series = f"{family}_total" if metric.kind == "counter" else family
        told = [family, series, {**self._labels, **labels}, metric.help]
        return file.values, file.new(json.dumps(told, sort_keys=True))

    def _open(self, kind: str) -> _File:
        if self._folder is None:
            return _File(None)
        # In a folder of vLLM's, a process may have a file of vLLM's own figures beside ours.
        path = self._folder / f"{kind}_kvtune-{os.getpid()}.db"
        try:
            return _File(path)
        except OSError as error:
            _say_missing(error)
            return _File(None)


class _File:
    """A file of series and their values; only memory without a path."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, _SIZE_BYTES)
        else:
            new = path.with_suffix(".new")  # a reader takes no file that is half made
            with new.open("w+b") as file:
                # Written out whole: a full file system says so here, and not where a page of
                # memory is missing later, which would end the process.
                file.write(bytes(_SIZE_BYTES))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _SIZE_BYTES)
            self._set_used(8)
            new.replace(path)
        self._used = 8
        self.values = memoryview(self._map).cast("d")

    def new(self, key: str) -> int:
        """Begin a series at 0; return where its value is among `values`."""
        text = key.encode()
        padded = text + b" " * (8 - (len(text) + 4) % 8)
        entry = struct.pack(f"=i{len(padded)}sdd", len(text), padded, 0.0, 0.0)
        end = self._used + len(entry)
        if end > _SIZE_BYTES:
            raise ValueError(f"there is no room for another series: {key}")
        self._map[self._used : end] = entry
        self._set_used(end)
        return (end - 16) // 8

    def _set_used(self, used: int) -> None:
        self._map[:4] = struct.pack("=i", used)
        self._used = used


_current: Counters | None = None


def counters() -> Counters:
    """The figures of this process; a fork asks for its own."""
    global _current
    if _current is None:
        labels = {"engine": _engine(), "model_name": os.environ.get(MODEL, "")}
        _current = Counters(_folder(), labels)
    return _current


def start_anew() -> None:
    """Count into the folder that is named now, from 0."""
    global _current
    _current = None


def _engine() -> str:
    """Which of a data-parallel server's engines this process belongs to, as vLLM numbers them.

    vLLM tells it in the name of the engine's process, which is this one, or started it.
    """
    started_by = multiprocessing.parent_process()
    names = multiprocessing.current_process().name, started_by.name if started_by else ""
    found = re.search(r"EngineCore_DP(\d+)", " ".join(names))
    return found[1] if found else "0"


def _folder() -> Path | None:
    try:
        folder = metrics_folder.writing()
    except OSError as error:
        _say_missing(error)
        return None
    if folder is None:
        _say_missing("the server that started this process named no folder for them")
    return folder


def _say_missing(why: object) -> None:
    _logger.warning("Figures of kvtune's plugin will be missing on /metrics: %s", why)


os.register_at_fork(after_in_child=start_anew)
