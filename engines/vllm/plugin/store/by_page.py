"""Layers whose cache holds whole pages of tokens together: KIVI (2402.02750).

A page is quantized once it is full. Until then it is in full precision, beside the cache. What a
token sees is decided by its place alone: its own page in full precision, up to itself, and the
pages before as they are quantized. So rows are split by pages, and neither chunks of a prefill, nor
preemption, nor a hit in the prefix cache change what a token computes; only full pages are ever
published. KIVI's residual is thus what is open, 1 to a page of tokens, of keys and of values; the
paper keeps the values of the last R tokens, and lets a prompt see itself in full precision.

Open pages take memory beside the pool: at most one for each of --max-num-seqs requests, and those
of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.store import in_full
from kvtune.engines.vllm.plugin.store.grouped import GroupedPages, grouped_pages
from kvtune.engines.vllm.plugin.store.open_pages import Moves, OpenPages
from kvtune.engines.vllm.plugin.store.pages import read_pages, rows_by_page
from kvtune.policies.plugin_config import StoreConfig


@dataclass(frozen=True, slots=True)
class Step:
    """What a step's metadata says to layers, as `store_step`.

    `moves`: of open pages. `row_of_token` [tokens]: the row of each, which writes to one page.
    `closed` [rows]: pages before that.
    """

    moves: Moves
    row_of_token: Tensor
    closed: Tensor


def builder_class(stock: type) -> type:
    """`stock`, an `AttentionMetadataBuilder`, with rows of one written page each."""

    class Builder(stock):  # type: ignore[misc]
        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.open_pages = OpenPages(vllm_config.scheduler_config.max_num_seqs)

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            size = self.kv_cache_spec.block_size
            source, starts, lengths = rows_by_page(
                common.query_start_loc_cpu, in_full.lengths_on_host(common), size
            )
            table = common.block_table_tensor[source]
            queries = starts.diff()
            closed = (lengths - 1) // size
            moves = self.open_pages.step(
                table[torch.arange(len(source)), closed].tolist(),
                ((lengths - queries) % size == 0).tolist(),
                (lengths % size == 0).tolist(),
            )
            starts = starts.to(common.query_start_loc_cpu.dtype)
            rows = common.replace(
                num_reqs=len(source),
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                max_query_len=int(queries.max()),
                seq_lens=lengths.to(common.seq_lens.dtype),
                seq_lens_cpu_upper_bound=lengths.to(common.seq_lens.dtype),
                max_seq_len=int(lengths.max()),
                block_table_tensor=table,
                is_prefilling=None,
                req_idx=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            )
            metadata = super().build(0, rows, fast_build)
            metadata.store_step = Step(moves, torch.repeat_interleave(queries), closed)
            return metadata

    return Builder


def impl_class(stock: type, asked: StoreConfig) -> type:
    """`stock`, an `AttentionImpl`, over pages of the format that is `asked` for."""

    class Impl(in_full.impl_class(stock)):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.open = torch.empty(0)

        def do_kv_cache_update(self, *_: Any) -> None:
            """Nothing: `forward` writes, as the step's moves are known there."""

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
            if attn_metadata is not None:
                step: Step = attn_metadata.store_step
                tokens = len(step.row_of_token)
                slots = attn_metadata.slot_mapping[:tokens]
                self._write(step, key[:tokens], value[:tokens], slots, kv_cache)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, **scales
            )

        def _write(
            self, step: Step, key: Tensor, value: Tensor, slots: Tensor, kv_cache: Tensor
        ) -> None:
            moves = step.moves
            self._grow(moves.count, key, kv_cache)
            self._close(moves.early, kv_cache)
            if moves.fresh:
                self.open[moves.fresh] = 0
            if moves.again:
                at, pages = (list(each) for each in zip(*moves.again, strict=True))
                both = self._format(kv_cache).decode(_by_head(kv_cache[pages]), key.dtype)
                self.open[at] = torch.cat(both, dim=-1).view_as(self.open[at])
            slot_of_token = torch.tensor(moves.slots)[step.row_of_token]
            self.open[slot_of_token, :, slots % kv_cache.shape[2]] = torch.cat((key, value), dim=-1)
            self._close(moves.full, kv_cache)

        def _grow(self, count: int, key: Tensor, kv_cache: Tensor) -> None:
            """Have room for so many open pages."""
            held = len(self.open)
            if held >= count:
                return
            _, heads, page_tokens, _ = kv_cache.shape
            grown = key.new_zeros(count, heads, page_tokens, 2 * self.head_size)
            if held:
                grown[:held] = self.open
            counters().add("open_page_bytes", grown.nbytes - (self.open.nbytes if held else 0))
            self.open = grown

        def _close(self, moves: list[tuple[int, int]], kv_cache: Tensor) -> None:
            """Quantize what is in these slots into these pages."""
            if not moves:
                return
            at, pages = (list(each) for each in zip(*moves, strict=True))
            keys, values = _by_head(self.open[at]).split(self.head_size, dim=-1)
            encoded = self._format(kv_cache).encode(keys, values)
            kv_cache[pages] = encoded.view(len(pages), *kv_cache.shape[1:])
            counters().add("kv_bytes_stored", encoded.nbytes)

        def in_full(
            self, layer: Any, kv_cache: Tensor, metadata: Any, rows: slice, query: Tensor
        ) -> tuple[Tensor, Tensor]:
            step: Step = metadata.store_step
            closed = step.closed[rows]
            page_tokens = kv_cache.shape[2]
            pages, numbered = read_pages(
                metadata.block_table[rows], closed * page_tokens, page_tokens
            )
            slots = torch.tensor(step.moves.slots[rows])
            full = self.room(kv_cache, len(pages) + len(slots), query)
            stored = self._format(kv_cache)
            self.fill(
                layer,
                full[: len(pages)],
                pages,
                lambda chunk: stored.decode(_by_head(kv_cache[chunk]), query.dtype),
            )
            self.fill(layer, full[len(pages) :], slots, self._opened)
            table = torch.nn.functional.pad(numbered, (0, 1))
            own = torch.arange(len(closed))
            table[own, closed] = (len(pages) + own).to(table.dtype)
            read = kv_cache[0].nbytes * len(pages) + self.open[0].nbytes * len(slots)
            counters().add("kv_bytes_read", read)
            return full, table

        def _opened(self, slots: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = _by_head(self.open[slots]).split(self.head_size, dim=-1)
            return keys, values

        def _format(self, kv_cache: Tensor) -> GroupedPages:
            return grouped_pages(asked, self.head_size, kv_cache.shape[2])

    return Impl


def _by_head(pages: Tensor) -> Tensor:
    """[pages, heads, n, ...] as [pages x heads, n, ...]."""
    return pages.flatten(0, 1)
