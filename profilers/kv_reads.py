"""How much of its KV decoding reads: less than all where kvtune's plugin skips some.

The plugin counts on its server's page of metrics. What is derived from lengths, by vLLM or here, is
of dense attention.
"""

from __future__ import annotations

from collections.abc import Mapping

PAGES_SEEN = "kvtune:pages_seen_total"
PAGES_READ = "kvtune:pages_read_total"


def read_share(counters: Mapping[str, float]) -> float:
    """Of the pages that decode steps would have read, the share that they read; 1 without plugin.

    `counters` are of one stretch of time.
    """
    seen, read = counters.get(PAGES_SEEN), counters.get(PAGES_READ)
    return min(1.0, read / seen) if seen and read else 1.0
