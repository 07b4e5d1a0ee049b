"""Read a server's counters and gauges from its Prometheus page.

A series is named by its metric and labels, without those that only say which engine it comes
from: `vllm:num_requests_waiting_by_reason{reason="capacity"}`. Engines of one page are added up,
also those of several servers that a gateway puts into one, if they serve the same model. Shares
(`..._perc`) are averaged, and a second series shows the fullest engine, whose requests wait while
the mean looks harmless. The parser is lenient: what it cannot read it skips.

What vLLM exports, of what is read here, by version (from `vllm/v1/metrics` of each release):

    vllm:gpu_cache_usage_perc, gpu_prefix_cache_*          to 0.11   now kv_cache_*, prefix_cache_*
    vllm:kv_cache_usage_perc, prefix_cache_*               from 0.10, beside the old names
    vllm:kv_block_* (with --kv-cache-metrics)              from 0.12
    vllm:prompt_tokens_cached                              from 0.16
    vllm:estimated_*_per_gpu (with --enable-mfu-metrics)   from 0.18
    vllm:num_requests_waiting_by_reason                    from 0.20
    kv_cache_size_tokens in vllm:cache_config_info         from 0.24
    vllm:iteration_tokens_total without cached tokens      from pull request 43346, May 2026
    everything else                                        from 0.10 to 0.32
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kvtune.address import without_query
from kvtune.profilers.load.http import HttpPool
from kvtune.types import Endpoint

RUNNING = "vllm:num_requests_running"
LOAD_GAUGES = (
    RUNNING,
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
)
PREFIX_COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
)
"""Counters that are sampled during a run too: whether prefix hits fall shows only over time, and
that the server restarted."""

ENGINES = "kvtune:engines"
"""A gauge of our own: how many engines the page speaks of, where there are several."""

FULLEST = '{engines="fullest"}'
"""Follows the name of a share: its largest value over several engines."""

_SHARES = ("vllm:kv_cache_usage_perc",)
_RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
}
START = "process_start_time_seconds"
"""Tells a restart; servers of several processes do not export it."""

# Who exports a series: vLLM's own labels, then those that Prometheus, Kubernetes and Ray add.
_ENGINE_LABELS = frozenset(
    (
        *("engine", "model_name"),
        *("instance", "job", "namespace", "pod", "container", "node", "service", "endpoint"),
        *("WorkerId", "ReplicaId", "SessionName"),
    )
)
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|(?=\}))')
_ESCAPE = re.compile(r"\\(.)")
_PAGE_LIMIT_BYTES = 64 * 1024 * 1024

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Samples:
    """One reading: `counters` only grow while the server lives, `gauges` are of the moment.

    Buckets, sums and counts of histograms are counters. Values that are not finite are left out;
    `unknown` names their series.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    skipped_lines: int = 0
    unknown: frozenset[str] = frozenset()


def parse_metrics(text: str, only: Sequence[str] | None = None) -> Samples:
    """Parse a page in the Prometheus text format, or only the metrics named in `only`."""
    renamed = {old: new for old, new in _RENAMED.items() if new not in text}
    # Running requests are always read: they tell which labels say who exports a series.
    wanted = None if only is None else (*only, *renamed, RUNNING)
    kinds: dict[str, str] = {}
    found: dict[tuple[str, Labels], float] = {}
    skipped = 0
    for line in text.splitlines():
        if wanted is not None and not line.startswith(wanted) and not line.startswith("# TYPE"):
            continue
        if not line or line.isspace():
            continue
        if line.startswith("#"):
            _read_kind(line, kinds)
        elif (sample := _read_sample(line)) is None:
            skipped += 1
        else:
            found[sample[0], sample[1]] = sample[2]
    counters, gauges = _aggregate(found, kinds, renamed)
    if only is not None:
        kept = (*only, ENGINES)
        gauges = {key: value for key, value in gauges.items() if key.partition("{")[0] in kept}
        counters = {key: value for key, value in counters.items() if key.partition("{")[0] in only}
    read = {**counters, **gauges}
    return Samples(
        {key: value for key, value in counters.items() if math.isfinite(value)},
        {key: value for key, value in gauges.items() if math.isfinite(value)},
        skipped,
        frozenset(key for key, value in read.items() if not math.isfinite(value)),
    )


def page_problem(text: str) -> str | None:
    """Why a page is no whole page of metrics; None if it is one."""
    if text.lstrip()[:1] == "<":
        return "a web page came instead of metrics"
    if not text.strip():
        return "the page is empty"
    if not text.endswith("\n"):
        return "the page is cut off"
    if not any(map(_read_sample, text.splitlines())):
        return "the page holds no metrics"
    return None


def of_model(text: str, model: str) -> str:
    """The page without the series of other models, which a gateway for several puts into one.

    A page that does not name the model is left as it is: a gateway may call it otherwise.
    """
    label = f'model_name="{_escape(model)}"'
    own = text.count(label)
    if not own or own == text.count('model_name="'):
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if 'model_name="' not in line or label in line)


def counters_delta(before: Samples, after: Samples) -> dict[str, float]:
    """Return how much each counter grew; one that restarted grew by what it shows now."""
    return {
        series: value - before.counters.get(series, 0.0)
        if value >= before.counters.get(series, 0.0)
        else value
        for series, value in after.counters.items()
        if series not in before.unknown
    }


def counter_resets(before: Samples, after: Samples) -> tuple[str, ...]:
    """Name the counters that went back or vanished: the server restarted in between."""
    return tuple(
        series
        for series, value in before.counters.items()
        if value > after.counters.get(series, 0.0) and series not in after.unknown
    )


class Scraper:
    """Fetches the metrics page of a server; what goes wrong lands in `problems`, never raised."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 10.0) -> None:
        self._pool, self._path = HttpPool.to_metrics(endpoint, connect_timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._model = endpoint.model
        self.problems: list[str] = []

    async def __aenter__(self) -> Scraper:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._pool.close()

    async def fetch(self) -> str | None:
        """Return the page, or None (and one more entry in `problems`) if it cannot be had."""
        page = _Page()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.exchange(self._pool.get(self._path), page)
        except TimeoutError:
            page.error = f"no answer within {self._timeout_s:g} s"
        if page.error is None and page.status != 200:
            page.error = f"HTTP {page.status}"
        text = page.content.decode(errors="replace")
        if (problem := page.error or page_problem(text)) is not None:
            self.problems.append(f"{without_query(self._path)}: {problem}")
            return None
        return of_model(text, self._model)

    async def read(self, only: Sequence[str] | None = None) -> Samples | None:
        """Return the parsed page, or None (and one more entry in `problems`)."""
        text = await self.fetch()
        return None if text is None else parse_metrics(text, only)


class _Page:
    """Receives a whole page; a `Receiver` of `http`."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()
        self.error: str | None = None

    def sent(self, now_s: float) -> None: ...

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_s: float) -> None:
        if len(self.content) < _PAGE_LIMIT_BYTES:
            self.content += data

    def end(self, error: str | None, now_s: float) -> None:
        self.error = error


def _read_kind(line: str, kinds: dict[str, str]) -> None:
    words = line.split()
    if len(words) == 4 and words[:2] == ["#", "TYPE"]:
        kinds[words[2]] = words[3].lower()


def _read_sample(line: str) -> tuple[str, Labels, float] | None:
    """Return name, sorted labels and value of a sample line; a time stamp is dropped."""
    name = _NAME.match(line)
    if name is None:
        return None
    labels: list[tuple[str, str]] = []
    at = name.end()
    if line.startswith("{", at):
        at += 1
        while label := _LABEL.match(line, at):
            labels.append((label[1], _unescape(label[2])))
            at = label.end()
        if not line.startswith("}", at):
            return None
        at += 1
    value = line[at:].split(maxsplit=1)
    if not value or not line[at].isspace():
        return None
    try:
        return name[0], tuple(sorted(labels)), float(value[0])
    except ValueError:
        return None


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)


def _aggregate(
    found: Mapping[tuple[str, Labels], float], kinds: Mapping[str, str], renamed: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    counters: dict[str, float] = defaultdict(float)
    gauges: dict[str, list[float]] = defaultdict(list)
    engines: set[Labels] = set()
    added = {label for name, labels in found if name == RUNNING for label, _ in labels}
    exporter = _ENGINE_LABELS | added
    for (name, labels), value in found.items():
        if name.endswith(("_created", "_info", ":info")):
            continue
        if any(label == "engine" for label, _ in labels):
            engines.add(tuple(pair for pair in labels if pair[0] in exporter))
        series = _series(renamed.get(name, name), labels, exporter)
        if _is_counter(name, kinds):
            counters[series] += value
        else:
            gauges[series].append(value)
    joined = {
        series: math.fsum(values) / (len(values) if _is_share(series) else 1)
        for series, values in gauges.items()
    }
    if len(engines) > 1:
        joined[ENGINES] = float(len(engines))
        joined |= {
            series + FULLEST: max(values) for series, values in gauges.items() if series in _SHARES
        }
    return dict(counters), joined


def _is_counter(name: str, kinds: Mapping[str, str]) -> bool:
    family = _SUFFIX.sub("", name)
    kind = kinds.get(name) or kinds.get(family)
    if kind in ("histogram", "summary"):
        return family != name
    return kind == "counter" if kind in ("counter", "gauge") else family != name


def _is_share(series: str) -> bool:
    return series.partition("{")[0].endswith("_perc")


def _series(name: str, labels: Labels, without: frozenset[str]) -> str:
    kept = ",".join(
        f'{label}="{_escape(value)}"' for label, value in labels if label not in without
    )
    return f"{name}{{{kept}}}" if kept else name


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
