"""The attention backend that vLLM is given: the stock one, wrapped for what is asked.

`Backend` is looked up by its name (`facts.BACKEND`) when a model's layers are made. It is the stock
class itself when nothing is asked; else a subclass with the same name, so that whatever vLLM does
for the stock backend it does for ours.

How a policy joins: it may wrap the implementation in `impl_class` (what a layer computes), and take
part in `builder.builder_class` (what a step prepares for all layers). Order: rows are compacted
first, so what joins later sees kept pages only, as if the request had no others.
"""

from __future__ import annotations

import functools
from typing import Any

from kvtune.engines.vllm.plugin.asked import asked_of, telling_fixes
from kvtune.engines.vllm.plugin.builder import builder_class
from kvtune.engines.vllm.plugin.front import check_again
from kvtune.engines.vllm.plugin.layers import checked
from kvtune.policies.plugin_config import PluginConfig


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    asked = asked_of(config)
    if asked.is_asked:
        with telling_fixes():
            check_again(config, asked)
    stock = stock_backend()
    if not asked.changes_attention:
        return stock
    return backend_class(stock, asked, config.max_in_flight_tokens)


def stock_backend() -> Any:
    """The class that this platform's servers run without kvtune."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend


@functools.cache
def backend_class(stock: Any, asked: PluginConfig, max_in_flight_tokens: int) -> type:
    """The subclass of the `stock` backend that does what is `asked` for."""
    stock_impl, stock_builder = checked(stock.get_impl_cls(), asked), stock.get_builder_cls()
    if asked.store is not None:
        from kvtune.engines.vllm.plugin.store import wrapped

        # Below all else, so that to the other policies pages are as stock ones.
        stock_impl, stock_builder = wrapped(stock_impl, stock_builder, asked.store)
    impl = impl_class(stock_impl, asked)
    builder = builder_class(stock_builder, asked, stock_impl)

    class Backend(stock):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> type:
            return impl

        @staticmethod
        def get_builder_cls() -> type:
            return builder

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            from kvtune.engines.vllm.plugin.spec import policy_spec

            with telling_fixes():
                return policy_spec(stock.customize_spec(spec), asked, max_in_flight_tokens)

    return Backend


def impl_class(stock: type, asked: PluginConfig) -> type:
    """`stock`, an `AttentionImpl`, with what is `asked` for."""
    if asked.quest is not None:
        from kvtune.engines.vllm.plugin import quest

        stock = quest.impl_class(stock, asked.quest)
    if asked.page_eviction is not None:
        from kvtune.engines.vllm.plugin.evict import attention

        stock = attention.impl_class(stock)
    return stock
