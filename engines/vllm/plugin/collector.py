"""Show on a server's own /metrics what the processes of the server count.

vLLM's page is that of prometheus_client's registry, where this joins. Where vLLM has the files of
many processes put together instead (several API servers), those of `counters` are among them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtune.engines.vllm.plugin import metrics_folder


class Figures:
    """What lies below a folder: figures of the process that it is named for, and of all that this
    one started, also of those that ended. A collector of prometheus_client.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Any]:
        """One family for each metric, added up over the processes."""
        from prometheus_client.multiprocess import MultiProcessCollector

        files = [str(file) for file in self._folder.rglob("*.db")]
        return MultiProcessCollector.merge(files) if files else ()


@functools.cache
def expose() -> None:
    """Let this process, and those that it starts, count for one page. Once; more are the same."""
    from prometheus_client import REGISTRY

    REGISTRY.register(Figures(metrics_folder.settle()))
