"""Show on a server's own /metrics what the processes of the server count.

vLLM's page is that of prometheus_client's registry, where this joins. Where vLLM has the files of
many processes put together instead (several API servers), those of `counters` are among them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtune import __version__
from kvtune.engines.vllm.plugin import metrics_folder
from kvtune.engines.vllm.plugin.counters import MODEL, counters, start_anew
from kvtune.policies.plugin_config import PluginConfig
from kvtune.types import fingerprint_of


class Figures:
    """What the processes of a server counted, also those that ended. A prometheus_client collector.

    `folder` is where they leave it; without one nothing is shown.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None

    def collect(self) -> Iterable[Any]:
        """One family for each metric, added up over the processes."""
        from prometheus_client.multiprocess import MultiProcessCollector

        files = self.folder.glob("*.db") if self.folder is not None else ()
        families: Iterable[Any] = MultiProcessCollector.merge([str(file) for file in files])
        return families


def begin(asked: PluginConfig, vllm_config: Any) -> None:
    """Show figures of the server that this process is about to start, and what it was `asked`.

    Of several in one process, as `LLM(...)` makes them, the latest is shown: so does vLLM.
    """
    import vllm

    _exposed().folder = metrics_folder.settle()
    os.environ[MODEL] = str(vllm_config.model_config.served_model_name)
    start_anew()
    config = asked.model_dump(mode="json", exclude_none=True)
    counters().set(
        "info",
        1,
        policies="+".join(name for name in config if name not in ("schema_version", "protect")),
        config=json.dumps(config, sort_keys=True),
        fingerprint=fingerprint_of(config),
        kvtune=__version__,
        vllm=vllm.__version__,
    )


@functools.cache
def _exposed() -> Figures:
    """The one collector of this process."""
    from prometheus_client import REGISTRY

    figures = Figures()
    REGISTRY.register(figures)
    return figures
