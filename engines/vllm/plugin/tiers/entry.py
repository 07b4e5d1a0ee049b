"""The front-end's side: enter the connector into the configuration before a child process starts.

The configuration is complete by then, so what vLLM derives from a connector is to be known here: it
would see to the hybrid manager, which this connector supports, and to piecewise CUDA graphs, which
it does not need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvtune.engines.vllm.plugin.tiers import memory
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import TiersConfig


def enter(vllm_config: Any, asked: TiersConfig) -> None:
    """Have the server's processes make a `TiersConnector` each.

    Raises:
        BadInput: there is less memory, or files cannot be kept where they are asked for.
    """
    from vllm.config import KVTransferConfig

    parallel = vllm_config.parallel_config
    # Of several API servers each comes by here, when the engine may have taken its memory already.
    if parallel._api_process_count == 1 or parallel._api_process_rank < 0:
        memory.check(asked.host_bytes, vllm_config.cache_config.kv_cache_memory_bytes or 0)
    if asked.disk_bytes:
        _make_folder(Path(asked.disk_path))
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="TiersConnector",
        kv_connector_module_path="kvtune.engines.vllm.plugin.tiers.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )


def _make_folder(folder: Path) -> None:
    fix = "name a folder that the server may write to in tiers.disk_path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"tiers.disk_path cannot be a folder: {error}", fix=fix) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"tiers.disk_path cannot be written to: {folder}", fix=fix)
