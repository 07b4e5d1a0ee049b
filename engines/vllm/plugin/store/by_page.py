"""Layers whose cache holds whole pages of tokens together: KIVI (2402.02750).

A page is quantized once it is full. Until then it is in full precision, beside the cache. What a
token sees is decided by its place alone: its own page in full precision, up to itself, and the
pages before as they are quantized. So neither chunks of a prefill, nor preemption, nor a hit in the
prefix cache change what a token computes; only full pages are ever published. KIVI's residual is
thus what is open, 1 to a page of tokens, of keys and of values; the paper keeps the values of the
last R tokens, and lets a prompt see itself in full precision.

Open pages take memory beside the pool: at most one for each of --max-num-seqs requests, and those
of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.store.attend import (
    Rows,
    attend,
    pages_together,
    read_pages,
    rows_together,
)
from kvtune.engines.vllm.plugin.store.grouped import GroupedPages, grouped_pages
from kvtune.engines.vllm.plugin.store.open_pages import Moves, OpenPages
from kvtune.policies.plugin_config import StoreConfig


@dataclass(frozen=True, slots=True)
class Step:
    """What a step's metadata says to layers, as `store_step`.

    `moves`: of open pages, whose slots are those of all rows in order. `slot_of_token` [tokens].
    `slots` of each row: where the pages are that it writes to. `first_page` [rows]: the first.
    """

    moves: Moves
    slot_of_token: Tensor
    slots: list[list[int]]
    first_page: Tensor


def builder_class(stock: type) -> type:
    """`stock`, an `AttentionMetadataBuilder`, that keeps book of open pages."""

    class Builder(stock):  # type: ignore[misc]
        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.open_pages = OpenPages(vllm_config.scheduler_config.max_num_seqs)
            counters().add("early_pages", 0)

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            common = common_attn_metadata
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.store_step = step_of(
                self.open_pages,
                common.query_start_loc_cpu,
                common.seq_lens,
                common.block_table_tensor,
                self.kv_cache_spec.block_size,
            )
            # Of requests that ended, nobody reads such pages again.
            counters().add("early_pages", len(metadata.store_step.moves.again))
            return metadata

    return Builder


def step_of(
    open_pages: OpenPages,
    query_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    page_tokens: int,
) -> Step:
    """Plan which pages a step writes to.

    Args:
        open_pages: the book.
        query_starts: where the queries of each row begin in the step, [rows + 1].
        lengths: tokens of each row with its queries, which are written, [rows].
        block_table: page numbers, [rows, pages].
        page_tokens: tokens of a page.
    """
    ends = lengths.long()
    computed = ends - query_starts.long().diff()
    first = computed // page_tokens
    end = torch.where(computed < ends, -(-ends // page_tokens), first)
    counts = (end - first).tolist()
    pages, begins, full = [], [], []
    for row, (start, stop) in enumerate(zip(computed.tolist(), ends.tolist(), strict=True)):
        for page in range(int(first[row]), int(end[row])):
            pages.append(int(block_table[row, page]))
            begins.append(start <= page * page_tokens)
            full.append(stop >= (page + 1) * page_tokens)
    moves = open_pages.step(pages, begins, full)
    rows = torch.repeat_interleave(ends - computed)
    place = torch.arange(len(rows)) - (query_starts[:-1] - query_starts[0]).long()[rows]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    nth = (computed[rows] + place) // page_tokens - first[rows]
    slots = torch.tensor(moves.slots)
    return Step(
        moves,
        slots[offsets[rows] + nth],
        [part.tolist() for part in torch.split(slots, counts)],
        first,
    )


def impl_class(stock: type, asked: StoreConfig) -> type:
    """`stock`, an `AttentionImpl`, over pages of the format that is `asked` for."""

    class Impl(stock):  # type: ignore[misc]
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
            if attn_metadata is None:
                return super().forward(layer, query, key, value, kv_cache, None, output, **scales)
            step: Step = attn_metadata.store_step
            tokens = len(step.slot_of_token)
            slots = attn_metadata.slot_mapping[:tokens]
            self._write(step, key[:tokens], value[:tokens], slots, kv_cache)
            page_bytes = self.open[0].nbytes
            for rows in rows_together(
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                attn_metadata.block_table,
                kv_cache.shape[2],
                pages_together(page_bytes),
            ):
                self._attend(query, kv_cache, step, rows, output)
            return output

        def _attend(
            self, query: Tensor, kv_cache: Tensor, step: Step, rows: Rows, output: Tensor
        ) -> None:
            """To the pages before the last as they are quantized, and to the written ones in full.

            A token sees of the first those before its own page, and of the others its own page.
            """
            size = kv_cache.shape[2]
            stored = self._format(kv_cache)
            # Of shorter rows the last page is among these; nothing was quantized there yet.
            last = rows.places[:, -1:] // size
            table = torch.where(torch.arange(rows.table.shape[1]) < last, rows.table, 0)[:, :-1]
            quantized = read_pages(kv_cache, table, lambda pages: stored.decode(pages, query.dtype))
            written = self.open[torch.tensor([step.slots[row] for row in rows.numbers])]
            in_full = written.transpose(1, 2).flatten(2, 3).chunk(2, dim=-1)
            keys, values = (
                torch.cat(parts, dim=2) for parts in zip(quantized, in_full, strict=True)
            )
            before = torch.arange(quantized[0].shape[2])
            first = step.first_page[rows.numbers] * size
            at = (first[:, None] + torch.arange(in_full[0].shape[2]))[:, None]

            def sees(places: Tensor) -> Tensor:
                token = places[..., None]
                own = token // size * size
                return torch.cat([before < own, (at >= own) & (at <= token)], dim=-1)

            attend(query, keys, values, rows, sees, self.scale, output)
            read = int(last.sum()) * kv_cache[0].nbytes + written.nbytes
            counters().add("kv_bytes_read", read)

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
                both = self._format(kv_cache).decode(kv_cache[pages].flatten(0, 1), key.dtype)
                self.open[at] = torch.cat(both, dim=-1).view_as(self.open[at])
            offsets = slots % kv_cache.shape[2]
            self.open[step.slot_of_token, :, offsets] = torch.cat((key, value), dim=-1)
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
            keys, values = self.open[at].flatten(0, 1).chunk(2, dim=-1)
            encoded = self._format(kv_cache).encode(keys, values)
            kv_cache[pages] = encoded.view(len(pages), *kv_cache.shape[1:])
            counters().add("kv_bytes_stored", encoded.nbytes)

        def _format(self, kv_cache: Tensor) -> GroupedPages:
            return grouped_pages(asked, self.head_size, kv_cache.shape[2])

    return Impl
