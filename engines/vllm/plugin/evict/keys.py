"""Read keys back from a paged cache, in whatever order a backend's kernels want them to lie.

CPU kernels hold a page's keys transposed, or packed for AMX; which one depends on the processor and
the dtype. What they have in common is that a page of a KV head holds each number of its keys once,
unchanged. So where each lies is found out by writing a page of numbers that tell their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtune.errors import BadInput

_BASE = 128
"""Whole numbers below are exact in every floating dtype that caches have."""


class KeyReader:
    """`places` [page_tokens * d]: where in a page of one KV head each number of its keys lies."""

    def __init__(self, places: Tensor, page_tokens: int) -> None:
        self._places = places
        self.page_tokens = page_tokens

    @classmethod
    def of(
        cls, write: Callable[[Tensor, Tensor, Tensor, Tensor], None], cache: Tensor, width: int
    ) -> KeyReader:
        """Find out by writing into page 1 of a `cache` that nobody uses.

        Args:
            write: takes keys and values [tokens, kv_heads, d], a cache, and the slot of each token.
            cache: [pages, kv_heads, page_tokens, numbers per token].
            width: d.

        Raises:
            BadInput: the cache does not hold keys as they were written.
        """
        heads, page_tokens = cache.shape[1:3]
        slots = torch.arange(page_tokens, 2 * page_tokens, device=cache.device)
        total = page_tokens * width
        told = torch.arange(total, device=cache.device)
        held = torch.zeros(cache[1, 0].numel(), device=cache.device)
        base = 1
        while base < total:
            digit = (told // base % _BASE).to(cache.dtype)
            keys = digit.view(page_tokens, 1, width).repeat(1, heads, 1)
            # What belongs to values becomes negative in the sum.
            write(keys, torch.full_like(keys, -_BASE), cache, slots)
            held += cache[1, 0].flatten().float() * base
            base *= _BASE
        is_key = (held >= 0).nonzero().flatten()
        order = held[is_key].sort()
        if len(is_key) != total or not torch.equal(order.values, told.float()):
            raise BadInput(
                "page eviction cannot read keys back from this KV cache",
                fix="leave page_eviction out, or take --kv-cache-dtype auto",
            )
        return cls(is_key[order.indices], page_tokens)

    def read(self, cache: Tensor, pages: Tensor) -> Tensor:
        """The keys in `pages` [rows, p] of a cache as in `of`.

        Returns:
            [rows, kv_heads, p * page_tokens, d].
        """
        held = cache[pages].flatten(3).index_select(3, self._places)
        keys = held.view(*held.shape[:3], self.page_tokens, -1).transpose(1, 2)
        return keys.flatten(2, 3)


def key_reader(builder: Any) -> KeyReader:
    """How keys are read back from the caches of a metadata builder's layers, which are all alike.

    Raises:
        BadInput: as `KeyReader.of`.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

    spec = builder.kv_cache_spec
    names = list(builder.layer_names)[:1]
    (layer,) = get_layers_from_vllm_config(builder.vllm_config, Attention, names).values()
    *shape, content_bytes = compute_layer_kv_cache_shape_bytes(spec, 2)
    numbers = content_bytes // spec.dtype.itemsize
    cache = torch.zeros(*shape, numbers, dtype=spec.dtype, device=builder.device)

    def write(keys: Tensor, values: Tensor, into: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, into, slots)

    return KeyReader.of(write, cache, spec.head_size)
