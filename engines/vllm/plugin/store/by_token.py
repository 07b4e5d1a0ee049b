"""Layers whose cache holds each token by itself, as a cell of bytes.

What a token sees is what is stored, of itself and of its own prompt too: neither chunks of a
prefill nor a hit in the prefix cache change what it computes. The papers and the reference engine
let a prompt see itself in full precision, which no page remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.store.attend import (
    attend,
    pages_together,
    read_pages,
    rows_together,
)
from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.policies.plugin_config import StoreConfig


def impl_class(stock: type, asked: StoreConfig) -> type:
    """`stock`, an `AttentionImpl`, over cells of the format that is `asked` for."""

    class Impl(stock):  # type: ignore[misc]
        def do_kv_cache_update(
            self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            # Slots of padding are below 0.
            used = (slot_mapping >= 0).nonzero().flatten()
            slots = slot_mapping[used]
            cells = cells_of(asked, self.head_size, key.dtype)
            encoded = cells.encode(key[used].transpose(0, 1), value[used].transpose(0, 1))
            page_tokens = kv_cache.shape[2]
            kv_cache[slots // page_tokens, :, slots % page_tokens] = encoded.transpose(0, 1)
            counters().add("kv_bytes_stored", encoded.nbytes)

        def written_keys(self, key: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Tensor:
            """A step's keys, [tokens, Hk, d], as they read back; those of padding say nothing."""
            slots, page_tokens = attn_metadata.slot_mapping, kv_cache.shape[2]
            written = kv_cache[slots // page_tokens, :, slots % page_tokens]
            return cells_of(asked, self.head_size, key.dtype).keys(written)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            **scales: Any,
        ) -> Any:
            if attn_metadata is None:
                return super().forward(layer, query, key, value, kv_cache, None, output, **scales)
            cells = cells_of(asked, self.head_size, query.dtype)
            turned = cells.queries(query)
            attended = torch.empty_like(output)
            _, heads, page_tokens, _ = kv_cache.shape
            vectors = 2 * heads * page_tokens
            for rows in rows_together(
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                attn_metadata.block_table,
                page_tokens,
                pages_together(vectors * self.head_size * query.element_size()),
            ):
                keys, values = read_pages(kv_cache, rows.table, cells.decode)
                attend(
                    turned,
                    keys,
                    values,
                    rows,
                    _up_to_itself(keys.shape[2]),
                    self.scale,
                    attended,
                )
                pages = rows.places[:, -1] // page_tokens + 1
                counters().add("kv_bytes_read", int(pages.sum()) * kv_cache[0].nbytes)
            return output.copy_(cells.outputs(attended))

    return Impl


def _up_to_itself(tokens: int) -> Callable[[Tensor], Tensor]:
    """Which of so many tokens those at some places see."""
    at = torch.arange(tokens)
    return lambda places: at <= places[..., None]
