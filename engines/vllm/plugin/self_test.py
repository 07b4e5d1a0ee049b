"""Before the first request: does the stock backend do with rewritten rows what we take it to do?

The policies are right if a kernel asks of a row nothing but its pages, its length and its queries,
and if the cache is laid out as its shape says. Another version of vLLM, another kernel or another
format of the cache may break that without an error. So each start runs a small batch through one
layer: as rewritten by us, and as the stock backend sees it over a cache in which there never was
anything but what is kept. The answers must agree. It takes milliseconds and a few pages.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvtune.errors import BadInput
from kvtune.policies.sink_window import SinkWindow

Keep = Callable[[Any, SinkWindow], Any]
Content = tuple[Tensor, Tensor]


def check(builder: Any, stock_builder: type, stock_impl: type, keep: Keep) -> None:
    """Hold attention over rows that `keep` rewrites against the stock backend's over what is kept.

    `builder` is made for layers that are ready to attend; the stock classes are those that it and
    the layers' implementation extend.

    Raises:
        BadInput: the answers differ, so a server would answer wrong.
    """
    size: int = builder.kv_cache_spec.block_size
    window = SinkWindow(sink_tokens=1, window_tokens=2 * size, block_tokens=size)
    # A decode step, a chunk whose first token drops a page less than its last, and a request that
    # is too short to drop any; as (computed tokens, queries).
    requests = [(6 * size + 3, 1), (5 * size - 2, 4), (7, 5)]
    layer = _Layer(builder, stock_builder, stock_impl)
    contents = [layer.content(computed + queries) for computed, queries in requests]
    asking = layer.queries(sum(queries for _, queries in requests))

    cache, common = layer.lay_out(contents, [queries for _, queries in requests])
    ours = layer.attend(cache, keep(common, window), asking)
    alone = [
        (keys[seen], values[seen])
        for (keys, values), (computed, queries) in zip(contents, requests, strict=True)
        for token in range(computed, computed + queries)
        for seen in [_seen(token, window)]
    ]
    cache, common = layer.lay_out(alone, [1] * len(alone))
    expected = layer.attend(cache, common, asking)
    off = _off(ours, expected)
    # A token too many or too few changes little where pages are long, and rounding still less. But
    # kernels for FP8 may round attention weights as roughly as the cache.
    is_fp8 = builder.vllm_config.cache_config.cache_dtype.startswith("fp8")
    tolerance = 1 / 16 if is_fp8 else 2 * torch.finfo(ours.dtype).eps + 1e-5
    if not off <= tolerance:  # NaN is off too
        raise BadInput(
            "the self-test of kvtune's plugin failed: attention to what is kept is off by "
            f"{off:.2%}, which is more than rounding ({tolerance:.2%})",
            fix="take kvtune's section out of --additional-config with this vLLM and KV cache",
        )


def _off(ours: Tensor, expected: Tensor) -> float:
    """How far the worst token's answer is from what it should be, as a share of that."""
    difference = (ours.float() - expected.float()).flatten(1).norm(dim=1)
    return float((difference / expected.float().flatten(1).norm(dim=1)).max())


def _seen(token: int, window: SinkWindow) -> list[int]:
    """The places that a token attends to, in order."""
    first = token // window.block_tokens - window.window_blocks
    return [
        place
        for place in range(token + 1)
        for page in [place // window.block_tokens]
        if page < window.sink_blocks or page >= first
    ]


class _Layer:
    """One layer of the model with a cache of its own, as the stock backend runs it."""

    def __init__(self, builder: Any, stock_builder: Any, stock_impl: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        names = list(builder.layer_names)[:1]
        (self._layer,) = get_layers_from_vllm_config(builder.vllm_config, Attention, names).values()
        self._builder, self._stock_builder, self._stock_impl = builder, stock_builder, stock_impl
        self._spec = builder.kv_cache_spec
        self._random = torch.Generator().manual_seed(0)

    def _normal(self, tokens: int, heads: int) -> Tensor:
        drawn = torch.randn(tokens, heads, self._spec.head_size, generator=self._random)
        return drawn.to(self._builder.device, self._builder.vllm_config.model_config.dtype)

    def content(self, tokens: int) -> Content:
        """Keys and values, each [tokens, kv_heads, d]."""
        heads = self._spec.num_kv_heads
        return self._normal(tokens, heads), self._normal(tokens, heads)

    def queries(self, tokens: int) -> Tensor:
        """Queries, [tokens, heads, d]."""
        return self._normal(tokens, self._layer.impl.num_heads)

    def lay_out(self, contents: list[Content], queries: list[int]) -> tuple[Tensor, Any]:
        """A cache that holds these requests on pages in no order, and a step of so many queries."""
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

        size, device = self._spec.block_size, self._builder.device
        lengths = [len(keys) for keys, _ in contents]
        held = [-(-length // size) for length in lengths]
        # Page 0 is vLLM's null page.
        numbers = torch.randperm(sum(held), generator=self._random) + 1
        shape = compute_layer_kv_cache_shape_bytes(self._spec, sum(held) + 1)
        cache = torch.zeros(prod(shape), dtype=torch.int8, device=device)
        cache = cache.view(self._spec.dtype).view(*shape[:3], -1)
        table = torch.zeros(len(contents), max(held), dtype=torch.int32)
        for row, (keys, values) in enumerate(contents):
            pages = numbers[sum(held[:row]) : sum(held[: row + 1])]
            table[row, : len(pages)] = pages
            slots = (pages[:, None] * size + torch.arange(size)).flatten()[: len(keys)]
            self._stock_impl.do_kv_cache_update(
                self._layer.impl, self._layer, keys, values, cache, slots.to(device)
            )
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        on_host = torch.tensor(lengths, dtype=torch.int32)
        return cache, CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=on_host.to(device),
            seq_lens_cpu_upper_bound=on_host,
            num_reqs=len(lengths),
            num_actual_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(device),
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=device),
        )

    def attend(self, cache: Tensor, common: Any, queries: Tensor) -> Tensor:
        """What the queries get in a step, [tokens, heads, d]."""
        metadata = self._stock_builder.build(self._builder, 0, common)
        output = torch.zeros_like(queries)
        self._stock_impl.forward(
            self._layer.impl, self._layer, queries, None, None, cache, metadata, output
        )
        return output
