"""Quest in vLLM: a decode step reads the pages that its query may need (2406.10774).

No kernel of its own: per layer, each sparse row is shown to the stock kernel as a request whose
block table names the chosen pages only. Its length is the same in all layers, so what the kernel
wants to know of the batch is computed once per step. Where KV heads choose apart, each becomes a
request of one KV head, over a view of the cache in which a page of one head is a page.

Prompts read everything, down to a last chunk of one token: what they compute is exact, and may be
published to the prefix cache. Only what decode steps compute is not. After a preemption, tokens of
an answer that are computed again read what they read at first, each for itself.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.rows import host_lengths
from kvtune.engines.vllm.plugin.selection import choose, page_scores, pages_to_read
from kvtune.engines.vllm.plugin.summaries import Summaries, Writes, writes_of
from kvtune.policies.plugin_config import QuestConfig

_log = logging.getLogger("vllm.kvtune")


@dataclass(frozen=True, slots=True)
class Sparse:
    """The tokens of a step that read a part of their pages, each in a row of its own.

    `tokens`: which of the step's they are, [rows]. `table`: all their pages, [rows, p], of which
    the first `held` are theirs and `kept` are read, among them the first `protected` of each row.
    `metadata`: the stock kernel's for these rows (each of them once per KV head where heads choose
    apart), but for the pages. `others`: the stock kernel's for the whole step, in which rows that
    have no other token are as short as can be; None where all are such.
    """

    tokens: Tensor
    table: Tensor
    held: Tensor
    kept: Tensor
    protected: int
    metadata: Any
    others: Any


@dataclass(frozen=True, slots=True)
class Step:
    """What `Steps.prepare` leaves in a step's metadata for the layers, as `quest`."""

    writes: Writes
    sparse: Sparse | None


class Steps:
    """What is the same in all layers of a step.

    `builder` is the metadata builder that it works for. The pages of the first `protected_tokens`
    of a request are read in any case, also beyond the budget.
    """

    def __init__(self, builder: Any, asked: QuestConfig, protected_tokens: int) -> None:
        self.asked = asked
        self.page_tokens: int = builder.kv_cache_spec.block_size
        self.protected = -(-protected_tokens // self.page_tokens)
        self.dense_layers = sum(
            _layer_index(name) < asked.dense_layers for name in builder.layer_names
        )
        self.sparse_layers = len(builder.layer_names) - self.dense_layers
        self.is_told = False
        # Without policies of its own it builds what the stock kernel wants for any batch.
        self.plain = copy.copy(builder)
        self.plain.sink_window = self.plain.quest = self.plain.eviction = None
        self.per_head = copy.copy(self.plain)
        self.parts = 1
        if asked.per_kv_head:
            self.parts = builder.num_kv_heads
            self.per_head.num_heads = builder.num_heads // self.parts
            self.per_head.num_kv_heads = 1

    def prepare(self, metadata: Any, common: Any, answers: Tensor | None) -> Any:
        """Say in a step's `metadata` what its layers have to do; `common` is of the same rows.

        `answers`: which tokens are of answers, [tokens], on the host; None where nobody knows.
        """
        writes = writes_of(common.slot_mapping, self.page_tokens)
        metadata.quest = Step(writes, self._sparse(common, answers))
        return metadata

    def _sparse(self, common: Any, answers: Tensor | None) -> Sparse | None:
        starts, ends = common.query_start_loc_cpu.long(), host_lengths(common)
        queries = starts.diff()
        if answers is None:
            self._say_unknown()
            every = -(-ends[queries == 1] // self.page_tokens)
            self._count(every, every)
            return None
        tokens = answers.nonzero().flatten()
        rows = torch.repeat_interleave(queries)[tokens]
        lengths = ends[rows].long() - (starts[rows + 1] - 1 - tokens)
        held = -(-lengths // self.page_tokens)
        kept = pages_to_read(self.asked, held, self.page_tokens)
        kept = kept.clamp(min=self.protected + 1).minimum(held)
        is_step = queries[rows] == 1
        self._count(held[is_step], kept[is_step])
        is_sparse = kept < held
        if not is_sparse.any():
            return None
        tokens, rows, lengths = tokens[is_sparse], rows[is_sparse], lengths[is_sparse]
        held, kept = held[is_sparse], kept[is_sparse]
        is_done = torch.zeros(len(queries), dtype=torch.bool)
        is_done[rows] = queries[rows] == 1
        # All pages that are read but the last are full.
        read = kept * self.page_tokens - (-lengths) % self.page_tokens
        device = common.seq_lens.device
        table = common.block_table_tensor[rows.to(device), : int(held.max())].long()
        return Sparse(
            tokens.to(device),
            table,
            held.to(device),
            kept.to(device),
            self.protected,
            self._rows(common, read.repeat_interleave(self.parts), int(kept.max())),
            None if bool(is_done.all()) else self._others(common, ends, is_done),
        )

    def _say_unknown(self) -> None:
        # A row of one token may be the end of a prompt, which others will use.
        if not self.is_told:
            self.is_told = True
            _log.warning("This vLLM does not tell prompts from answers: Quest reads all pages.")

    def _rows(self, common: Any, lengths: Tensor, pages: int) -> Any:
        """The stock kernel's metadata for rows of one token that read so many tokens."""
        count, device = len(lengths), common.seq_lens.device
        starts = torch.arange(count + 1, dtype=torch.int32)
        read = lengths.to(torch.int32)
        return self.per_head.build(
            0,
            common.replace(
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(read.max()),
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=read.to(device),
                seq_lens_cpu_upper_bound=read,
                is_prefilling=torch.zeros(count, dtype=torch.bool),
                block_table_tensor=torch.zeros(count, pages, dtype=torch.int32, device=device),
                positions=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            ),
        )

    def _others(self, common: Any, lengths: Tensor, is_done: Tensor) -> Any:
        """The stock kernel's metadata in which rows that are done cost next to nothing."""
        short = torch.where(is_done, 1, lengths).to(lengths.dtype)
        return self.plain.build(
            0,
            common.replace(
                seq_lens=short.to(common.seq_lens.device),
                seq_lens_cpu_upper_bound=short,
                max_seq_len=int(short.max()),
                _num_computed_tokens_cache=None,
            ),
        )

    def _count(self, held: Tensor, kept: Tensor) -> None:
        seen, read = int(held.sum()), int(kept.sum())
        counters().add("pages_seen", seen * (self.dense_layers + self.sparse_layers))
        counters().add("pages_read", seen * self.dense_layers + read * self.sparse_layers)


def make_room(builder: Any, asked: QuestConfig) -> None:
    """Take the memory for the bounds of a builder's layers, as that of the cache is taken now.

    Taken with the first request, it might be gone by then. While vLLM still profiles CUDA graphs on
    a cache of a few pages, it has no size yet: layers then take what its steps need.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    config = builder.vllm_config
    pages, dtype = config.cache_config.num_gpu_blocks, config.model_config.dtype
    if pages is None:
        return
    layers = get_layers_from_vllm_config(config, Attention, list(builder.layer_names))
    for name, layer in layers.items():
        if _layer_index(name) >= asked.dense_layers:
            layer.impl.make_room(pages, dtype, builder.device)


def impl_class(stock: type, asked: QuestConfig) -> type:
    """`stock`, an `AttentionImpl`, that reads what a step's `Sparse` leaves it.

    A store under it, as `stock`, says in `written_keys` how the keys of a step read back.
    """
    written_keys = getattr(stock, "written_keys", None)

    class Impl(stock):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.summaries: Summaries | None = None

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
            attend = super().forward
            everything = (layer, query, key, value, kv_cache)
            if attn_metadata is None or _layer_index(layer.layer_name) < asked.dense_layers:
                return attend(*everything, attn_metadata, output, **scales)
            # Bounds are of the keys that queries meet, which a store has rounded.
            keys = written_keys(self, key, kv_cache, attn_metadata) if written_keys else key
            summaries = self.make_room(len(kv_cache), key.dtype, kv_cache.device)
            summaries.update(keys, attn_metadata.quest.writes)
            sparse: Sparse | None = attn_metadata.quest.sparse
            if sparse is None:
                return attend(*everything, attn_metadata, output, **scales)
            if sparse.others is not None:
                attend(*everything, sparse.others, output, **scales)
            queries = query[sparse.tokens]
            attended = torch.empty_like(queries)
            sparse.metadata.block_table = self._chosen(queries, sparse)
            parts = self.num_kv_heads if asked.per_kv_head else 1
            attend(
                layer,
                _split(queries, parts),
                key,
                value,
                _split(kv_cache, parts),
                sparse.metadata,
                _split(attended, parts),
                **scales,
            )
            output[sparse.tokens] = attended
            return output

        def _chosen(self, queries: Tensor, sparse: Sparse) -> Tensor:
            """The block table of `sparse.metadata` in this layer."""
            assert self.summaries is not None
            scores = page_scores(queries, self.summaries.bounds, sparse.table)
            scores[..., : sparse.protected] = float("inf")
            if not asked.per_kv_head:
                positions = choose(scores.mean(dim=0), sparse.held, sparse.kept)
                return sparse.table.gather(1, positions).int()
            positions = choose(scores, sparse.held, sparse.kept)
            heads = torch.arange(len(scores), device=scores.device)[:, None, None]
            pages = sparse.table.expand(len(scores), -1, -1).gather(2, positions)
            return (pages * len(scores) + heads).transpose(0, 1).flatten(0, 1).int()

        def make_room(self, pages: int, dtype: torch.dtype, device: torch.device) -> Summaries:
            """Have bounds for a cache of so many pages; of another, nothing is known any more."""
            if self.summaries is None or self.summaries.bounds.shape[1] != pages:
                before = 0 if self.summaries is None else self.summaries.bounds.nbytes
                self.summaries = Summaries(pages, self.num_kv_heads, self.head_size, dtype, device)
                counters().add("summary_bytes", self.summaries.bounds.nbytes - before)
            return self.summaries

    return Impl


def _split(rows: Tensor, parts: int) -> Tensor:
    """Make `parts` rows of each, which share its heads in order: a view of [rows, heads, ...]."""
    return rows.view(rows.shape[0] * parts, rows.shape[1] // parts, *rows.shape[2:])


def _layer_index(name: str) -> int:
    """3 of `model.layers.3.self_attn.attn`."""
    return next(int(part) for part in name.split(".") if part.isdigit())
