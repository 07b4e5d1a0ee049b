"""The KV connector over which the engine process and the worker talk about evictions.

It transfers no KV; vLLM has no other channel of its own for what a policy says. vLLM makes one in
each process. `handle_preemptions` is the one call that precedes a step's metadata, in every step of
model runner V1; V2 has it too late, so that the plugin refuses to run with V2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtune.engines.vllm.plugin.asked import asked_of
from kvtune.engines.vllm.plugin.evict.ledger import Ledger, Scheduled
from kvtune.engines.vllm.plugin.evict.marks import Marks
from kvtune.engines.vllm.plugin.evict.orders import Orders
from kvtune.engines.vllm.plugin.evict.steps import Worker


def attach(vllm_config: Any) -> None:
    """Enter the connector into a configuration that has none."""
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=EvictionConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_producer",
    )


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """To the worker, with each step."""

    orders: Orders


@dataclass
class Decisions(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """To the engine process, after a step: the mask of the pages that go, by ticket."""

    masks: dict[int, int]

    def aggregate(self, other: Any) -> Decisions:
        """Those of several workers; the plugin runs with one."""
        return Decisions(self.masks | other.masks)


class EvictionConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A `Ledger` in the engine process, a `Worker` in the worker."""

    # Nothing is delivered, so that nothing is computed again for it.
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        asked = asked_of(vllm_config)
        (group,) = kv_cache_config.kv_cache_groups
        self.page_tokens: int = group.kv_cache_spec.block_size
        budget = asked.page_budget(self.page_tokens)
        assert budget is not None
        assert asked.page_eviction is not None
        if role is KVConnectorRole.WORKER:
            self.worker = Worker(self.page_tokens, asked.page_eviction)
        else:
            self.ledger = Ledger(budget)
            self.requests: dict[str, Any] = {}
            self.marks = Marks(asked.protect.prefix_tokens, self.page_tokens)
            self.longest_tokens: int = vllm_config.model_config.max_model_len

    # In the engine process.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Let the manager free what the ledger says."""
        super().bind_kv_cache_manager(kv_cache_manager)
        (self.manager,) = kv_cache_manager.coordinator.single_type_managers
        self.manager.evictions = self.ledger.evictions

    def on_new_request(self, request: Any) -> None:
        """Enter a request that may become long enough."""
        prompt = request.num_prompt_tokens
        most = self.longest_tokens
        if not request.resumable:
            most = min(prompt + request.max_tokens, most)
        self.ledger.begin(request.request_id, prompt, most, self.marks.begin(request))
        if self.ledger.concerns(request.request_id):
            self.requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Say what the worker has to do in a step that is scheduled now."""
        return StepOrders(self.ledger.orders(self._scheduled(scheduler_output)))

    def _scheduled(self, scheduler_output: Any) -> Iterator[Scheduled]:
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            if (request := self.requests.get(name)) is not None:
                start = request.num_computed_tokens
                pages = self.manager.req_to_blocks[name]
                tail = pages[(start + tokens - 1) // self.page_tokens]
                yield Scheduled(name, start, start + tokens, tail.block_id)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the worker decided in a step."""
        decisions = connector_output.kv_connector_worker_meta
        for ticket, mask in decisions.masks.items() if decisions is not None else ():
            if (name := self.ledger.name_of(ticket)) is not None:
                self.ledger.decide(name, mask, self.requests[name].num_computed_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, whose pages may go; tell it what it lost, if it asks."""
        told = self.marks.end(request, self.ledger.lost(request.request_id))
        self.ledger.end(request.request_id)
        self.requests.pop(request.request_id, None)
        return False, told

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No KV comes from here."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """No KV comes from here."""

    # In the worker.

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take a step's orders; the first call of each step."""
        self.worker.begin_step(kv_connector_metadata.orders)

    def build_connector_worker_meta(self) -> Decisions | None:
        """Say what is decided after a step; the last call of each step."""
        masks = self.worker.end_step()
        return Decisions(masks) if masks else None

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """No KV comes from here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No KV comes from here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any
    ) -> None:
        """No KV goes from here."""

    def wait_for_save(self) -> None:
        """No KV goes from here."""
