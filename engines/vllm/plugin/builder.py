"""The metadata builder: what the kernels of a step are told of each request.

vLLM builds once per step and group of layers. What is the same in every layer happens here: rows
lose the pages that StreamingLLM or page eviction took from them. What differs by layer (Quest's
choice of pages) is prepared here and done in the attention of the layer.
"""

from __future__ import annotations

import logging
from typing import Any

from kvtune.engines.vllm.plugin.asked import telling_fixes
from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.rows import (
    host_lengths,
    kept_rows,
    with_rows,
    without_middle,
)
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.sink_window import SinkWindow

_log = logging.getLogger("vllm.kvtune")

UNTESTED = (
    "The self-test of kvtune's plugin cannot be run over a %s store: that this vLLM attends to it "
    "rightly was not seen at this start. Compare answers to long prompts with stock ones."
)


def builder_class(stock: type, asked: PluginConfig, stock_impl: type) -> type:
    """`stock`, an `AttentionMetadataBuilder`, with what is `asked` for.

    `stock_impl` is the implementation that goes with it, for the self-test.
    """
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvtune.engines.vllm.plugin import prompts, self_test

    class Builder(stock):  # type: ignore[misc]
        # A table that is put in later would be one with every page in it.
        supports_update_block_table = False

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            with telling_fixes():
                self._begin(kv_cache_spec, vllm_config)

        def _begin(self, kv_cache_spec: Any, vllm_config: Any) -> None:
            if kv_cache_spec.block_size != vllm_config.cache_config.block_size:
                raise BadInput(
                    f"the kernels take pages of {kv_cache_spec.block_size} tokens, but pages of "
                    f"{vllm_config.cache_config.block_size} are freed and shared",
                    fix=f"set --block-size {kv_cache_spec.block_size}",
                )
            if asked.store is not None and asked.store.is_grouped:
                # Grouped pages hold what was written in order only, and the test writes in none.
                _log.warning(UNTESTED, asked.store.format)
            else:
                self_test.check(self, stock, stock_impl, kept)
            self.sink_window = asked.sink_window(kv_cache_spec.block_size)
            self.quest = self.eviction = None
            if asked.quest is not None:
                from kvtune.engines.vllm.plugin import quest

                prompts.listen()
                self.quest = quest.Steps(self, asked.quest, asked.protect.prefix_tokens)
                quest.make_room(self, asked.quest)
            if asked.page_eviction is not None:
                from kvtune.engines.vllm.plugin.evict import steps

                self.eviction = steps.Steps(self)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """Attention stays out of graphs: tables are new tensors in each step."""
            return AttentionCGSupport.NEVER

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            whole = common = common_attn_metadata
            answers = None if self.quest is None else prompts.answers(whole)
            scoring = None
            if self.sink_window is not None:
                common = kept(common, self.sink_window)
            if self.eviction is not None:
                common, scoring = self.eviction.prepare(common)
            if self.sink_window is not None or self.eviction is not None:
                self._count(whole, common)
            metadata = super().build(common_prefix_len, common, fast_build)
            if self.eviction is not None:
                metadata.eviction = scoring
            if self.quest is not None:
                metadata = self.quest.prepare(metadata, common, answers)
            return metadata

        def _count(self, whole: Any, common: Any) -> None:
            """Count the pages that decode steps of all layers are spared."""
            size = self.kv_cache_spec.block_size
            seen, read = _decoded_pages(whole, size), _decoded_pages(common, size)
            layers = len(self.layer_names)
            if self.quest is None:
                counters().add("pages_seen", seen * layers)
                counters().add("pages_read", read * layers)
            else:
                # Quest counts those that it has before it.
                counters().add("pages_seen", (seen - read) * layers)

    return Builder


def _decoded_pages(common: Any, page_tokens: int) -> int:
    """How many pages the rows have that answer, and do not read a prompt."""
    decodes = common.query_start_loc_cpu.diff() == 1
    if common.is_prefilling is not None:
        decodes &= ~common.is_prefilling
    return int((-(-host_lengths(common)[decodes] // page_tokens)).sum())


def kept(common: Any, sink_window: SinkWindow) -> Any:
    """A step's `CommonAttentionMetadata` in which each row has the pages that its tokens see.

    Lengths become those of what is kept.
    """
    lengths = host_lengths(common)
    rows = kept_rows(common.query_start_loc_cpu, lengths, sink_window)
    if rows is None:
        return common
    device = common.seq_lens.device
    # vLLM's tables are as wide as a request may get, which is far more than any has at most times.
    width = -(-int(lengths.max()) // sink_window.block_tokens)
    table = without_middle(
        common.block_table_tensor[rows.source.to(device), :width],
        sink_window.sink_blocks,
        rows.dropped.to(device),
    )
    return with_rows(common, rows.source, rows.query_starts, rows.lengths, table)
