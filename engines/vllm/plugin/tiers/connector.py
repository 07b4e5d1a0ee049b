"""The tiers as vLLM's KV connector: the same class in the engine process and in the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtune.engines.vllm.plugin.asked import asked_of
from kvtune.engines.vllm.plugin.tiers.identity import identity
from kvtune.engines.vllm.plugin.tiers.mover import Mover
from kvtune.engines.vllm.plugin.tiers.pages import Pages
from kvtune.engines.vllm.plugin.tiers.planner import Planner, Step, slots_of

_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class Planned(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way to the worker."""

    step: Step


@dataclass
class Ended(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended, on its way back: lost names by request, and files with whether they are there."""

    loaded: list[tuple[str, list[str]]] = field(default_factory=list)
    written: list[tuple[str, bool]] = field(default_factory=list)

    def aggregate(self, other: Self) -> Self:
        """Put that of two workers together."""
        return type(self)(self.loaded + other.loaded, self.written + other.written)


class TiersConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Host memory and disk behind the prefix cache of one engine with one worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        asked = asked_of(vllm_config)
        assert asked.tiers is not None, "front enters this connector only where it is asked for"
        self._asked = asked.tiers
        (group,) = kv_cache_config.kv_cache_groups
        self._num_blocks = kv_cache_config.num_blocks
        self._block_tokens = group.kv_cache_spec.block_size
        if role == KVConnectorRole.SCHEDULER:
            self._planner = Planner(
                asked.tiers,
                identity(vllm_config, kv_cache_config, asked),
                self._block_tokens,
                len(group.layer_names) * group.kv_cache_spec.page_size_bytes,
            )
            self._requests_local_tokens: dict[str, int] = {}
        self._mover: Mover | None = None
        self._ended = Ended()
        self._unread_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for what is kept."""
        return False

    # --- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the pages of the worker; make host memory for them."""
        pages = Pages(kv_caches.values(), self._num_blocks)
        slots = slots_of(self._asked, pages.row_bytes)
        self._mover = Mover(pages, slots, Path(self._asked.disk_path))

    @property
    def mover(self) -> Mover:
        """What moves bytes, from `register_kv_caches` on."""
        assert self._mover is not None
        return self._mover

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begin to bring pages back, and to remove files."""
        step = self._get_connector_metadata().step
        for request_id, loads in step.loads.items():
            self.mover.load(request_id, loads)
        self.mover.drop(step.dropped)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is read by the step that begins to load it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Pages are kept once all layers are computed."""

    def wait_for_save(self) -> None:
        """Keep the pages that this step completed.

        vLLM calls it of a step that was broken off too, by an error or a signal to end. What such a
        step leaves in its pages is not what their names say, and files of them would outlive it.
        """
        if sys.exc_info()[0] is not None:
            return
        self.mover.store(self._get_connector_metadata().step.stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """The requests whose pages are there."""
        loaded, written = self.mover.take()
        for each in loaded:
            self._ended.loaded.append((each.request_id, [load.name for load in each.lost]))
            self._unread_blocks |= {load.block_id for load in each.lost}
        self._ended.written += [(each.name, each.is_there) for each in written]
        return None, {each.request_id for each in loaded}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The pages that are to be computed, as they could not be brought back."""
        unread, self._unread_blocks = self._unread_blocks, set()
        return unread

    def build_connector_worker_meta(self) -> Ended | None:
        """What the engine process is to know."""
        if not (self._ended.loaded or self._ended.written):
            return None
        ended, self._ended = self._ended, Ended()
        return ended

    def shutdown(self) -> None:
        """Finish what is being written, and let others have the files."""
        if self._mover is not None:
            self._mover.close()
        if self.role == KVConnectorRole.SCHEDULER:
            self._planner.close()

    # --- engine process -------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens behind the prefix cache's can be brought back; at least one is not."""
        first = num_computed_tokens // self._block_tokens
        end = (request.num_tokens - 1) // self._block_tokens
        tokens = self._planner.loadable_tokens(request.block_hashes[first:end])
        self._requests_local_tokens[request.request_id] = num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Bring a request's pages back, now that there is room for them."""
        if not num_external_tokens:
            return
        first = self._requests_local_tokens[request.request_id] // self._block_tokens
        end = first + num_external_tokens // self._block_tokens
        (block_ids,) = blocks.get_block_ids()
        self._planner.load(
            request.request_id, request.block_hashes[first:end], block_ids[first:end]
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tiers a request's tokens come from."""
        tiers = self._planner.tokens_by_tier(request.request_id)
        return {_SOURCES[tier]: tokens for tier, tokens in tiers.items()}

    def build_connector_meta(self, scheduler_output: Any) -> Planned:
        """Plan a step: keep what it publishes, also what a new request found published."""
        computed: list[tuple[bytes, int]] = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduled[new.req_id]
            computed += self._published(new.req_id, 0, end)
        running = scheduler_output.scheduled_cached_reqs
        for request_id, begin in zip(running.req_ids, running.num_computed_tokens, strict=True):
            computed += self._published(request_id, begin, begin + scheduled[request_id])
        return Planned(self._planner.step(computed))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what ended in the worker."""
        ended = connector_output.kv_connector_worker_meta
        if ended is None:
            return
        for request_id, lost in ended.loaded:
            self._planner.loaded(request_id, lost)
        for name, is_there in ended.written:
            self._planner.written(name, is_there=is_there)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Nothing of a request is needed any more; its pages may go."""
        self._requests_local_tokens.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget what is kept."""
        self._planner.forget()
        return True

    def _published(self, request_id: str, begin: int, end: int) -> Iterable[tuple[bytes, int]]:
        """The pages that end among a request's tokens [begin, end) and that others may use."""
        (manager,) = self._kv_cache_manager.coordinator.single_type_managers
        first, last = begin // self._block_tokens, end // self._block_tokens
        for block in manager.req_to_blocks[request_id][first:last]:
            # Unpublished is what is not computed as its tokens alone would have it.
            if block.block_hash is not None:
                yield get_block_hash(block.block_hash), block.block_id
