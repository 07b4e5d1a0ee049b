"""How long prompts and answers were, as a server counted them in its own histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from kvtune.types import Histogram

PROMPTS = "vllm:request_prompt_tokens"
ANSWERS = "vllm:request_generation_tokens"

_LE = re.compile(r'le="([^"]+)"')


def server_lengths(counters: Mapping[str, float], metric: str) -> Histogram | None:
    """The histogram `metric` of a window, from the deltas of its cumulative buckets.

    The bins are the server's, empty ones at the ends left out; percentiles are not told. What is
    longer than the last bound is counted in a bin that ends at twice that bound. None where no
    request finished.
    """
    bounds: dict[float, float] = {}
    for series, value in counters.items():
        if series.startswith(f"{metric}_bucket{{") and (found := _LE.search(series)):
            bound = float(found[1])
            bounds[bound] = bounds.get(bound, 0.0) + value
    total = counters.get(f"{metric}_count")
    if not bounds or not total:
        return None
    edges, counts, below = [0.0], [], 0.0
    for bound, cumulative in sorted(bounds.items()):
        edges.append(2 * edges[-1] if math.isinf(bound) else bound)
        counts.append(max(0, round(cumulative - below)))
        below = cumulative
    sum_tokens = counters.get(f"{metric}_sum")
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return None
    first, last = filled[0], filled[-1]
    return Histogram(
        edges=tuple(edges[first : last + 2]),
        counts=tuple(counts[first : last + 1]),
        mean=None if sum_tokens is None else sum_tokens / total,
        p50=None,
        p95=None,
        p99=None,
    )
