"""The worker's side of page eviction: what a step's rows are to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.evict.choice import pages_to_drop
from kvtune.engines.vllm.plugin.evict.keys import KeyReader, key_reader
from kvtune.engines.vllm.plugin.evict.orders import Ask, Orders, mask_of
from kvtune.engines.vllm.plugin.evict.rows import KeptRows, kept_rows, kept_table
from kvtune.engines.vllm.plugin.evict.scores import Look
from kvtune.engines.vllm.plugin.rows import host_lengths, with_rows
from kvtune.errors import EngineError
from kvtune.policies.page_budget import PageBudget
from kvtune.policies.plugin_config import PageEvictionConfig
from kvtune.types import FailureClass


class Worker:
    """What a worker remembers between steps: `totals` of attention by ticket, while a window lasts.

    `orders` are those of the step under way; between steps there are none.
    """

    def __init__(self, budget: PageBudget, asked: PageEvictionConfig) -> None:
        self.budget = budget
        self.asked = asked
        self.orders = Orders()
        self.totals: dict[int, Tensor] = {}

    def begin_step(self, orders: Orders) -> None:
        """Take a step's orders, before its metadata is built."""
        self.orders = orders
        begun = (ask.ticket for ask in orders.asks.values() if ask.begins)
        for ticket in (*orders.over, *begun):
            self.totals.pop(ticket, None)

    def total(self, ask: Ask, device: Any) -> Tensor:
        """What each token of the prompt received so far, [prompt_tokens] in float32."""
        if ask.ticket not in self.totals:
            self.totals[ask.ticket] = torch.zeros(ask.prompt_tokens, device=device)
        return self.totals[ask.ticket]

    def end_step(self) -> dict[int, int]:
        """Decide on prompts that are complete now: the mask of the pages that go, by ticket."""
        asks, self.orders = self.orders.asks.values(), Orders()
        return {
            ask.ticket: mask_of(pages_to_drop(self.totals.pop(ask.ticket), self.budget, self.asked))
            for ask in asks
            if ask.ends
        }


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a step's layers do for the worker, in the step's metadata as `eviction`."""

    looks: list[Look]
    reader: KeyReader

    def add(self, queries: Tensor, cache: Tensor, scale: float, softcap: float | None) -> None:
        """Add the attention of one layer: its queries [T, Hq, d], and its cache after them."""
        for look in self.looks:
            look.add(queries, self.reader.read(cache, look.pages), scale, softcap)


class Rows:
    """A step's rows under a worker's orders.

    Args:
        starts: where the queries of each row begin, [rows + 1], on the host.
        lengths: tokens of each row with its queries, [rows], on the host.
        table: pages of each row, [rows, pages].
        worker: what it was told of the step.

    Raises:
        EngineError: an order is for a row that is not there, so nothing can be relied on.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, table: Tensor, worker: Worker) -> None:
        self._starts, self._lengths, self._table, self._worker = starts, lengths, table, worker
        self._page_tokens = worker.budget.block_tokens
        last = ((lengths.long() - 1).clamp(min=0) // self._page_tokens).to(table.device)
        tails = table.gather(1, last[:, None].to(torch.int64)).flatten().tolist()
        rows = {tails[row]: row for row, length in enumerate(lengths.tolist()) if length}
        orders = worker.orders
        if lost := (orders.asks.keys() | orders.evictions.keys()) - rows.keys():
            raise EngineError(
                FailureClass.BROKEN_OUTPUT,
                f"page eviction does not find {len(lost)} requests among the {len(rows)} of a step",
                fix="leave page_eviction out with this version of vLLM",
            )
        self._asks = {rows[tail]: ask for tail, ask in orders.asks.items()}
        self._evictions = {rows[tail]: gone for tail, gone in orders.evictions.items()}

    def looks(self) -> list[Look]:
        """What rows have to score."""
        return [self._look(row, ask) for row, ask in self._asks.items()]

    def _look(self, row: int, ask: Ask) -> Look:
        begin, end = self._starts[row : row + 2].tolist()
        place = int(self._lengths[row]) - (end - begin)
        first = max(place, ask.prompt_tokens - self._worker.budget.window_tokens)
        past = min(place + end - begin, ask.prompt_tokens)
        return Look(
            slice(begin + first - place, begin + past - place),
            first,
            self._table[row, : -(-past // self._page_tokens)].long(),
            self._worker.total(ask, self._table.device),
        )

    def kept(self) -> KeptRows:
        """The rows without what they do not see."""
        return kept_rows(self._starts, self._lengths, self._evictions, self._page_tokens)


class Steps:
    """What a metadata builder does for page eviction, in each step."""

    def __init__(self, builder: Any) -> None:
        self._reader = key_reader(builder)

    def prepare(self, common: Any) -> tuple[Any, Scoring]:
        """A step's `CommonAttentionMetadata` without what rows do not see, and what they score."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        nothing = Scoring([], self._reader)
        if not has_kv_transfer_group():
            return common, nothing  # vLLM measures memory before there are requests
        worker: Worker = get_kv_transfer_group().worker
        orders, table = worker.orders, common.block_table_tensor
        if not orders.asks and not orders.evictions:
            return common, nothing
        rows = Rows(common.query_start_loc_cpu, host_lengths(common), table, worker)
        scoring = Scoring(rows.looks(), self._reader)
        if not orders.evictions:
            return common, scoring
        kept = rows.kept()
        left = kept_table(table[kept.source.to(table.device)], kept.masks)
        return with_rows(common, kept.source, kept.query_starts, kept.lengths, left), scoring
