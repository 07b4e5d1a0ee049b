"""What a layer tells vLLM of its KV cache under the plugin's policies.

Workers make these, the engine process gets them pickled. It sizes the pool and admits requests by
them, and takes the manager that is registered for their class: importing this module does that, so
that wherever a spec is, its manager is too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvtune.engines.vllm.plugin.manager import PolicyManager
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.sink_window import SinkWindow


@dataclass(frozen=True, kw_only=True)
class PolicySpec(FullAttentionSpec):  # type: ignore[misc]
    """Full attention, of which a request may hold a part only.

    `max_in_flight_tokens`: the most that is scheduled at a time and not yet settled.
    """

    asked: PluginConfig
    max_in_flight_tokens: int

    @property
    def sink_window(self) -> SinkWindow | None:
        """Which pages stay, if any leave."""
        return self.asked.sink_window(self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What one request of the longest length holds at most."""
        if self.sink_window is None:
            return int(super().max_memory_usage_bytes(vllm_config))
        blocks = self.sink_window.blocks_per_request(
            vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
        )
        return blocks * int(self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The spec of a group of layers, which are all alike."""
        one = specs[0]
        merged: Self = replace_as(
            FullAttentionSpec.merge(specs),
            cls,
            asked=one.asked,
            max_in_flight_tokens=one.max_in_flight_tokens,
        )
        return merged


def policy_spec(stock: Any, asked: PluginConfig, max_in_flight_tokens: int) -> PolicySpec:
    """The spec of a layer whose `stock` spec is this.

    Raises:
        BadInput: the layer does not attend to everything before it, and so holds something else.
    """
    if type(stock) is not FullAttentionSpec or (
        stock.sliding_window or stock.attention_chunk_size or stock.non_causal
    ):
        raise BadInput(
            f"kvtune's plugin cannot serve a layer whose KV cache is a {type(stock).__name__}",
            fix="take kvtune's section out of --additional-config for this model",
        )
    changes: dict[str, Any] = {}
    if asked.store is not None:
        from kvtune.engines.vllm.plugin.store.spec import packed

        changes = packed(stock, asked.store)
    made: PolicySpec = replace_as(
        stock, PolicySpec, asked=asked, max_in_flight_tokens=max_in_flight_tokens, **changes
    )
    return made


def _register() -> None:
    # vLLM registers its own specs only while there are none.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        PolicySpec, PolicyManager, uniform_type_base_spec=FullAttentionSpec
    )


_register()
