"""The metadata builder: what the kernels of a step are told of each request.

vLLM builds once per step and group of layers. What is the same in every layer happens here:
StreamingLLM's rows lose the pages between sinks and window. What differs by layer (Quest's choice
of pages) is prepared here and done in the attention of the layer.
"""

from __future__ import annotations

from typing import Any

from kvtune.engines.vllm.plugin.rows import without_middle
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.sink_window import SinkWindow


def builder_class(stock: type, asked: PluginConfig) -> type:
    """`stock`, an `AttentionMetadataBuilder`, with what is `asked` for."""
    from vllm.v1.attention.backend import AttentionCGSupport

    class Builder(stock):  # type: ignore[misc, valid-type]
        # A table that is put in later would be one with every page in it.
        supports_update_block_table = False

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
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
                common = kept(common, self.sink_window)
            metadata = super().build(common_prefix_len, common, fast_build)
            if self.quest is not None:
                metadata = self.quest.prepare(metadata, common)
            return metadata

    return Builder


def kept(common: Any, sink_window: SinkWindow) -> Any:
    """A step's `CommonAttentionMetadata` without what has left the window before the step.

    Lengths become those of what is kept. Positions and slots stay: they say where a token is.
    """
    block_tokens = sink_window.block_tokens
    first = sink_window.sink_blocks

    def dropped(lengths: Any, starts: Any) -> Any:
        computed = lengths - (starts[1:] - starts[:-1])
        return ((computed - sink_window.window_tokens) // block_tokens - first).clamp(min=0)

    on_host = common.seq_lens_cpu_upper_bound
    if on_host is None:
        on_host = common.seq_lens.cpu()
    left_on_host = dropped(on_host, common.query_start_loc_cpu)
    if not left_on_host.any():
        return common
    lengths_on_host = (on_host - left_on_host * block_tokens).to(on_host.dtype)
    left = dropped(common.seq_lens, common.query_start_loc)
    return common.replace(
        block_table_tensor=without_middle(common.block_table_tensor, first, left),
        seq_lens=(common.seq_lens - left * block_tokens).to(common.seq_lens.dtype),
        seq_lens_cpu_upper_bound=lengths_on_host,
        max_seq_len=int(lengths_on_host.max()),
        _num_computed_tokens_cache=None,
    )
