"""The metadata builder: what the kernels of a step are told of each request.

vLLM builds once per step and group of layers. What is the same in every layer happens here:
StreamingLLM's rows lose the pages between sinks and window. What differs by layer (Quest's choice
of pages) is prepared here and done in the attention of the layer.
"""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.rows import kept_rows, without_middle
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.sink_window import SinkWindow


def builder_class(stock: type, asked: PluginConfig, stock_impl: type) -> type:
    """`stock`, an `AttentionMetadataBuilder`, with what is `asked` for.

    `stock_impl` is the implementation that goes with it, for the self-test.
    """
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvtune.engines.vllm.plugin import self_test

    class Builder(stock):  # type: ignore[misc, valid-type]
        # A table that is put in later would be one with every page in it.
        supports_update_block_table = False

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            if kv_cache_spec.block_size != vllm_config.cache_config.block_size:
                raise BadInput(
                    f"the kernels take pages of {kv_cache_spec.block_size} tokens, but pages of "
                    f"{vllm_config.cache_config.block_size} are freed and shared",
                    fix=f"set --block-size {kv_cache_spec.block_size}",
                )
            # Grouped pages hold what was written in order only, and the test writes in none.
            if asked.store is None or not asked.store.is_grouped:
                self_test.check(self, stock, stock_impl, kept)
            self.sink_window = asked.sink_window(kv_cache_spec.block_size)
            self.quest = None
            if asked.quest is not None:
                from kvtune.engines.vllm.plugin import quest

                self.quest = quest.Steps(self, asked.quest)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """Attention stays out of graphs: tables are new tensors in each step."""
            return AttentionCGSupport.NEVER

        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            if self.sink_window is not None:
                whole, common = common, kept(common, self.sink_window)
                self._count(_decoded_pages(whole, self.sink_window), common)
            metadata = super().build(common_prefix_len, common, fast_build)
            if self.quest is not None:
                metadata = self.quest.prepare(metadata, common)
            return metadata

        def _count(self, seen: int, common: Any) -> None:
            """Count the pages that decode steps of all layers are spared, of `seen` ones."""
            read = _decoded_pages(common, self.sink_window)
            layers = len(self.layer_names)
            if self.quest is None:
                counters().add("pages_seen", seen * layers)
                counters().add("pages_read", read * layers)
            else:
                # Quest counts those that it has before it.
                counters().add("pages_seen", (seen - read) * layers)

    return Builder


def _host_lengths(common: Any) -> Any:
    """Tokens of each row with its queries, [rows], on the host: exact without speculation."""
    known = common.seq_lens_cpu_upper_bound
    return common.seq_lens.cpu() if known is None else known


def _decoded_pages(common: Any, sink_window: SinkWindow) -> int:
    """How many pages the rows have that answer, and do not read a prompt."""
    decodes = common.query_start_loc_cpu.diff() == 1
    if common.is_prefilling is not None:
        decodes &= ~common.is_prefilling
    return int((-(-_host_lengths(common)[decodes] // sink_window.block_tokens)).sum())


def kept(common: Any, sink_window: SinkWindow) -> Any:
    """A step's `CommonAttentionMetadata` in which each row has the pages that its tokens see.

    Lengths become those of what is kept. Positions and slots stay: they say where a token is.
    """
    on_host = _host_lengths(common)
    rows = kept_rows(common.query_start_loc_cpu, on_host, sink_window)
    if rows is None:
        return common
    device = common.seq_lens.device
    source = rows.source.to(device)
    starts = rows.query_starts.to(common.query_start_loc_cpu.dtype)
    lengths = rows.lengths.to(on_host.dtype)
    flags = common.is_prefilling
    return common.replace(
        num_reqs=len(source),
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        seq_lens=lengths.to(device, common.seq_lens.dtype),
        seq_lens_cpu_upper_bound=lengths,
        max_seq_len=int(lengths.max()),
        block_table_tensor=without_middle(
            common.block_table_tensor[source], sink_window.sink_blocks, rows.dropped.to(device)
        ),
        is_prefilling=None if flags is None else flags[source.to(flags.device)],
        req_idx=None if common.req_idx is None else common.req_idx[rows.source.numpy()],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
