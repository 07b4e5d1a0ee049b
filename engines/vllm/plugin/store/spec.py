"""How much a layer's pages take, from which vLLM sizes the pool and admits requests."""

from __future__ import annotations

from typing import Any

import torch

from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.engines.vllm.plugin.store.grouped import grouped_pages
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import StoreConfig


def packed(stock: Any, asked: StoreConfig) -> dict[str, Any]:
    """What of a `FullAttentionSpec` changes when pages are in the format that is `asked` for.

    Raises:
        BadInput: the format does not go with the layer's heads or pages.
    """
    if stock.head_size_v != stock.head_size:
        raise BadInput(
            f"kvtune's store cannot serve keys of {stock.head_size} channels with values of "
            f"{stock.head_size_v}",
            fix="take store out of kvtune's section of --additional-config for this model",
        )
    if asked.is_grouped:
        cell_bytes = grouped_pages(asked, stock.head_size, stock.block_size).nbytes
    else:
        cell_bytes = cells_of(asked, stock.head_size, stock.dtype).nbytes
    return {"dtype": torch.uint8, "state_content_bytes": cell_bytes}
