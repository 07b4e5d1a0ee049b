"""The server's statistics under vLLM's names, in the Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from kvtune.engines.simulated.scheduler import Sequence, Step

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(2**power for power in range(15))
_FEW = (1, 2, 3, 4, 5, 10, 20)

_HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_latency_seconds": _GAP_S,
    "request_time_per_output_token_seconds": _GAP_S,
    "e2e_request_latency_seconds": _LATENCY_S,
    "request_queue_time_seconds": _LATENCY_S,
    "request_inference_time_seconds": _LATENCY_S,
    "request_prefill_time_seconds": _LATENCY_S,
    "request_decode_time_seconds": _LATENCY_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_n": _FEW,
    "request_params_max_tokens": _TOKENS,
    "request_num_preemptions": _FEW,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "iteration_tokens_total": _STEP_TOKENS,
}
_COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    'prompt_tokens_by_source{source="local_compute"}',
    'prompt_tokens_by_source{source="local_cache_hit"}',
    'prompt_tokens_by_source{source="external_kv_transfer"}',
    "prompt_tokens_cached",
    'prompt_tokens_cached_by_source{source="device"}',
    "generation_tokens",
    'request_success{finished_reason="stop"}',
    'request_success{finished_reason="length"}',
    'request_success{finished_reason="abort"}',
    'request_success{finished_reason="error"}',
    'request_success{finished_reason="repetition"}',
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
)


class Histogram:
    """Counts of values up to each edge, their sum and their number."""

    __slots__ = ("_counts", "_edges", "count", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self.total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self.total += value
        self.count += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each edge with the number of values up to it; the last one is `+Inf`."""
        reached = 0
        for edge, count in zip((*self._edges, float("inf")), self._counts, strict=True):
            reached += count
            yield "+Inf" if edge == float("inf") else repr(float(edge)), reached


class Metrics:
    """Everything that `/metrics` shows. Gauges are set after a step, as vLLM does."""

    def __init__(self, model_name: str) -> None:
        self._labels = f'engine="0",model_name="{_escape(model_name)}"'
        self.counters = dict.fromkeys(_COUNTERS, 0.0)
        self.histograms = {name: Histogram(edges) for name, edges in _HISTOGRAMS.items()}
        self.gauges: dict[str, float] = {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            'num_requests_waiting_by_reason{reason="capacity"}': 0,
            'num_requests_waiting_by_reason{reason="deferred"}': 0,
            "kv_cache_usage_perc": 0,
            'engine_sleep_state{sleep_state="awake"}': 1,
        }

    def served(self, sequences: list[Sequence]) -> None:
        """Count the tokens that a step gave to `sequences`, one each."""
        computed = len(sequences)
        self.counters["generation_tokens"] += len(sequences)
        gaps = self.histograms["inter_token_latency_seconds"]
        for sequence in sequences:
            if sequence.gap_s is None:
                computed += self._first_token(sequence)
            else:
                gaps.add(sequence.gap_s)
        if sequences:
            self.histograms["iteration_tokens_total"].add(computed)

    def _first_token(self, sequence: Sequence) -> int:
        """Count a sequence's prompt; return how many of its tokens had to be computed."""
        computed = sequence.prompt_tokens - sequence.cached_tokens
        self.counters["prompt_tokens"] += sequence.prompt_tokens
        self.counters["prompt_tokens_cached"] += sequence.cached_tokens
        self.counters['prompt_tokens_by_source{source="local_compute"}'] += computed
        for series in (
            'prompt_tokens_by_source{source="local_cache_hit"}',
            'prompt_tokens_cached_by_source{source="device"}',
        ):
            self.counters[series] += sequence.cached_tokens
        waited_s = (sequence.first_token_s or 0.0) - sequence.arrived_s
        self.histograms["time_to_first_token_seconds"].add(max(0.0, waited_s))
        return computed

    def finished(self, sequence: Sequence, reason: str, max_tokens: int) -> None:
        """Count a sequence that ended, for whatever reason."""
        self.counters[f'request_success{{finished_reason="{reason}"}}'] += 1
        scheduled_s, first_s = sequence.scheduled_s, sequence.first_token_s
        last_s = sequence.last_token_s
        if scheduled_s is None or first_s is None or last_s is None:
            return
        values = {
            "e2e_request_latency_seconds": last_s - sequence.arrived_s,
            "request_queue_time_seconds": scheduled_s - sequence.arrived_s,
            "request_inference_time_seconds": last_s - scheduled_s,
            "request_prefill_time_seconds": first_s - scheduled_s,
            "request_decode_time_seconds": last_s - first_s,
            "request_time_per_output_token_seconds": (last_s - first_s)
            / max(1, sequence.generated_tokens - 1),
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.generated_tokens,
            "request_max_num_generation_tokens": sequence.generated_tokens,
            "request_params_n": 1,
            "request_params_max_tokens": max_tokens,
            "request_num_preemptions": sequence.preemptions,
            "request_prefill_kv_computed_tokens": sequence.prompt_tokens - sequence.cached_tokens,
        }
        for name, value in values.items():
            self.histograms[name].add(max(0.0, value))

    def estimated(self, step: Step, weight_bytes: int, kv_bytes_per_token: int) -> None:
        """Count a step's arithmetic and memory traffic, as `--enable-mfu-metrics` does."""
        # Two bytes and two operations a parameter.
        self.counters["estimated_flops_per_gpu"] += weight_bytes * step.tokens
        self.counters["estimated_read_bytes_per_gpu"] += (
            weight_bytes + step.context_tokens * kv_bytes_per_token
        )
        self.counters["estimated_write_bytes_per_gpu"] += step.tokens * kv_bytes_per_token

    def render(self, cache_info: Mapping[str, object]) -> str:
        """The page; `cache_info` are the labels of `vllm:cache_config_info`."""
        info = ",".join(f'{name}="{_escape(str(value))}"' for name, value in cache_info.items())
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{engine="0",{info}}} 1.0',
        ]
        typed: set[str] = set()
        for series, value in self.gauges.items():
            lines += self._sample(series, value, "gauge", typed)
        for series, value in self.counters.items():
            lines += self._sample(series, value, "counter", typed)
        for name, histogram in self.histograms.items():
            lines.append(f"# TYPE vllm:{name} histogram")
            lines += [
                f'vllm:{name}_bucket{{{self._labels},le="{edge}"}} {float(count)}'
                for edge, count in histogram.buckets()
            ]
            lines.append(f"vllm:{name}_count{{{self._labels}}} {float(histogram.count)}")
            lines.append(f"vllm:{name}_sum{{{self._labels}}} {histogram.total}")
        return "\n".join(lines) + "\n"

    def _sample(self, series: str, value: float, kind: str, typed: set[str]) -> Iterator[str]:
        name, _, labels = series.rstrip("}").partition("{")
        if name not in typed:
            typed.add(name)
            yield f"# TYPE vllm:{name} {kind}"
        suffix = "_total" if kind == "counter" else ""
        more = f",{labels}" if labels else ""
        yield f"vllm:{name}{suffix}{{{self._labels}{more}}} {float(value)}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
