"""The worker's side of page eviction: what a step's rows are to do, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.evict.choice import page_scores, pages_to_drop
from kvtune.engines.vllm.plugin.evict.keys import KeyReader, key_reader
from kvtune.engines.vllm.plugin.evict.orders import Ask, Orders, mask_of
from kvtune.engines.vllm.plugin.evict.rows import KeptRows, kept_rows, kept_table
from kvtune.engines.vllm.plugin.evict.scores import Keys, Look
from kvtune.engines.vllm.plugin.rows import host_lengths, with_rows
from kvtune.errors import EngineError
from kvtune.policies.plugin_config import PageEvictionConfig
from kvtune.types import FailureClass

ROWS_AT_ONCE = 16
"""Rows of one query that score together, so that what is read of them stays bounded."""


class Worker:
    """What a worker remembers between steps: by ticket, what each token received, in `totals`.

    `orders` are those of the step under way, and `looks` what its rows have to score.
    """

    def __init__(self, page_tokens: int, asked: PageEvictionConfig) -> None:
        self.page_tokens = page_tokens
        self.asked = asked
        self.orders = Orders()
        self.looks: list[Look] = []
        self.totals: dict[int, Tensor] = {}

    def begin_step(self, orders: Orders) -> None:
        """Take a step's orders, before its metadata is built."""
        self.orders, self.looks = orders, []
        for ticket in orders.over:
            self.totals.pop(ticket, None)

    def end_step(self) -> dict[int, int]:
        """Add up what the step's rows scored, and choose: the pages that go, by ticket."""
        for look in self.looks:
            for ticket, places, got in look.results():
                self._total(ticket, int(places[-1]) + 1)[places] += got
        asks, self.orders, self.looks = self.orders.asks.values(), Orders(), []
        return {ask.ticket: self._choose(ask) for ask in asks if ask.choice is not None}

    def _total(self, ticket: int, pages: int) -> Tensor:
        """What each token of a request's first pages received, at least [pages, page_tokens]."""
        total = self.totals.get(ticket, torch.zeros(0, self.page_tokens))
        if missing := max(pages - len(total), 0):
            total = torch.cat((total, total.new_zeros(missing, self.page_tokens)))
        self.totals[ticket] = total
        return total

    def _choose(self, ask: Ask) -> int:
        assert ask.choice is not None
        total = self.totals[ask.ticket] if self.asked.is_continuous else self.totals.pop(ask.ticket)
        scores = page_scores(total.flatten()[: ask.past], self.page_tokens, self.asked)
        return mask_of(pages_to_drop(scores, ask.choice))


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a step's layers do for the worker, in the step's metadata as `eviction`."""

    looks: list[Look]
    reader: KeyReader

    def add(self, queries: Tensor, cache: Tensor, scale: float, softcap: float | None) -> None:
        """Add the attention of one layer: its queries [T, Hq, d], and its cache after them."""
        for look in self.looks:
            look.add(queries, Keys(cache, self.reader, scale, softcap))


class Rows:
    """A step's rows under a worker's orders.

    Args:
        starts: where the queries of each row begin, [rows + 1], on the host.
        lengths: tokens of each row with its queries, [rows], on the host.
        table: pages of each row, [rows, pages].
        orders: what the worker was told of the step.
        page_tokens: tokens per page.

    Raises:
        EngineError: an order is for a row that is not there, so nothing can be relied on.
    """

    def __init__(
        self, starts: Tensor, lengths: Tensor, table: Tensor, orders: Orders, page_tokens: int
    ) -> None:
        self._starts, self._lengths, self._page_tokens = starts, lengths, page_tokens
        last = ((lengths.long() - 1).clamp(min=0) // page_tokens).to(table.device)
        tails = table.gather(1, last[:, None].to(torch.int64)).flatten().tolist()
        rows = {tails[row]: row for row, length in enumerate(lengths.tolist()) if length}
        if lost := (orders.asks.keys() | orders.evictions.keys()) - rows.keys():
            raise EngineError(
                FailureClass.BROKEN_OUTPUT,
                f"page eviction does not find {len(lost)} requests among the {len(rows)} of a step",
                fix="leave page_eviction out with this version of vLLM",
            )
        self._asks = {rows[tail]: ask for tail, ask in orders.asks.items()}
        evictions = {rows[tail]: gone for tail, gone in orders.evictions.items()}
        self.kept: KeptRows = kept_rows(starts, lengths, evictions, page_tokens)
        self.table = kept_table(table[self.kept.source.to(table.device)], self.kept.masks)

    def looks(self) -> list[Look]:
        """What rows have to score, those of one query together."""
        asks = list(self._asks.items())
        single = [each for each in asks if each[1].past - each[1].first == 1]
        several = [[each] for each in asks if each[1].past - each[1].first > 1]
        groups = [single[n : n + ROWS_AT_ONCE] for n in range(0, len(single), ROWS_AT_ONCE)]
        return [self._look(group) for group in (*groups, *several)]

    def _look(self, asks: Sequence[tuple[int, Ask]]) -> Look:
        """Rows that ask, as many queries each."""
        # What asks comes after all evictions, so it is in the last part of its row.
        sources = torch.tensor([row for row, _ in asks])
        parts = torch.searchsorted(self.kept.source, sources, right=True) - 1
        first = torch.tensor([ask.first for _, ask in asks])
        count = asks[0][1].past - asks[0][1].first
        from_end = first - self._lengths[sources]
        first_places = self.kept.lengths[parts] + from_end
        tokens = (self._starts[sources + 1] + from_end)[:, None] + torch.arange(count)
        held = (first_places + count - 1) // self._page_tokens + 1
        width = int(held.max())
        masks = {
            row: mask
            for row, part in enumerate(parts.tolist())
            if (mask := self.kept.masks.get(part))
        }
        every = torch.arange(self.table.shape[1]).expand(len(asks), -1)
        device = self.table.device
        return Look(
            tickets=[ask.ticket for _, ask in asks],
            tokens=tokens.to(device),
            first_places=first_places.to(device),
            pages=self.table[parts.to(device), :width].long(),
            places=kept_table(every, masks)[:, :width],
            held=held.tolist(),
            got=torch.zeros(len(asks), width * self._page_tokens, device=device),
        )


class Steps:
    """What a metadata builder does for page eviction, in each step."""

    def __init__(self, builder: Any) -> None:
        self._reader = key_reader(builder)

    def prepare(self, common: Any) -> tuple[Any, Scoring]:
        """A step's `CommonAttentionMetadata` without what rows do not see, and what they score."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return common, Scoring([], self._reader)  # vLLM measures memory before all requests
        worker: Worker = get_kv_transfer_group().worker
        orders, lengths = worker.orders, host_lengths(common)
        if not orders.asks and not orders.evictions:
            return common, Scoring([], self._reader)
        # vLLM's tables are as wide as a request may get, which is far more than most have.
        width = -(-int(lengths.max()) // worker.page_tokens)
        table = common.block_table_tensor[:, :width]
        rows = Rows(common.query_start_loc_cpu, lengths, table, orders, worker.page_tokens)
        worker.looks = rows.looks()
        if orders.evictions:
            kept = rows.kept
            common = with_rows(common, kept.source, kept.query_starts, kept.lengths, rows.table)
        return common, Scoring(worker.looks, self._reader)
