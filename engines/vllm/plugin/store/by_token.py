"""Layers whose cache holds each token by itself, as a cell of bytes.

What a token sees is what is stored, of itself and of its own prompt too: neither chunks of a
prefill nor a hit in the prefix cache change what it computes. The papers and the reference engine
let a prompt see itself in full precision, which no page remembers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.store import in_full
from kvtune.engines.vllm.plugin.store.cells import cells_of
from kvtune.engines.vllm.plugin.store.pages import read_pages
from kvtune.policies.plugin_config import StoreConfig


def impl_class(stock: type, asked: StoreConfig) -> type:
    """`stock`, an `AttentionImpl`, over cells of the format that is `asked` for."""

    class Impl(in_full.impl_class(stock)):  # type: ignore[misc]
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
            everything = (key, value, kv_cache, attn_metadata, output)
            if attn_metadata is None:
                return super().forward(layer, query, *everything, **scales)
            cells = cells_of(asked, self.head_size, query.dtype)
            super().forward(layer, cells.queries(query), *everything, **scales)
            return output.copy_(cells.outputs(output))

        def in_full(
            self, layer: Any, kv_cache: Tensor, metadata: Any, rows: slice, query: Tensor
        ) -> tuple[Tensor, Tensor]:
            _, _, page_tokens, cell_bytes = kv_cache.shape
            pages, table = read_pages(
                metadata.block_table[rows], metadata.seq_lens[rows], page_tokens
            )
            full = self.room(kv_cache, len(pages), query)
            cells = cells_of(asked, self.head_size, query.dtype)
            self.fill(
                layer,
                full,
                pages,
                lambda chunk: cells.decode(kv_cache[chunk].view(-1, page_tokens, cell_bytes)),
            )
            counters().add("kv_bytes_read", len(pages) * kv_cache[0].nbytes)
            return full, table

    return Impl
