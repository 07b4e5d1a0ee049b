"""The stock attention over pages that are not as it wrote them.

To attend, a layer reads the pages of the batch back into a scratch of full precision, laid out as
the stock cache is, and lets the stock kernel attend to that: one set of kernels for every format,
with all that they can do. The scratch is one for all layers, so that of a cache with L layers about
1 / L is in full precision at a time; a batch that would need more than `SCRATCH_BYTES` is attended
in parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.store.pages import groups_of_rows
from kvtune.errors import BadInput

SCRATCH_BYTES = 256 << 20
"""The most that is in full precision at a time, unless one request alone needs more."""

_CHUNK_BYTES = 4 << 20
"""Decoded at once: about what a processor's cache holds."""

ReadPages = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From the numbers of pages to their keys and values, each [pages x heads, tokens, width]."""


@dataclass(frozen=True, slots=True)
class RowsTogether:
    """Rows of a step that are attended at a time: which, their tokens, and the stock metadata."""

    rows: slice
    tokens: slice
    metadata: Any


def builder_class(stock: type) -> type:
    """`stock`, an `AttentionMetadataBuilder`, that says as `store_parts` what goes together.

    They are None when everything does.
    """

    class Builder(stock):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common, fast_build)
            lengths = lengths_on_host(common)
            pages = (-(-lengths // self.kv_cache_spec.block_size)).tolist()
            groups = groups_of_rows(pages, self._most_pages())
            metadata.store_parts = None
            if len(groups) > 1:
                metadata.store_parts = [self._part(common, lengths, rows) for rows in groups]
            return metadata

        def _most_pages(self) -> int:
            spec = self.kv_cache_spec
            vectors = spec.block_size * spec.num_kv_heads * 2
            dtype: torch.dtype = self.vllm_config.model_config.dtype
            return SCRATCH_BYTES // (vectors * spec.head_size * dtype.itemsize)

        def _part(self, common: Any, lengths: Tensor, rows: slice) -> RowsTogether:
            starts = common.query_start_loc_cpu[rows.start : rows.stop + 1]
            tokens = slice(int(starts[0]), int(starts[-1]))
            starts = starts - starts[0]
            part = common.replace(
                num_reqs=rows.stop - rows.start,
                num_actual_tokens=tokens.stop - tokens.start,
                max_query_len=int(starts.diff().max()),
                max_seq_len=int(lengths[rows].max()),
                query_start_loc=starts.to(common.query_start_loc.device),
                query_start_loc_cpu=starts,
                seq_lens=common.seq_lens[rows],
                seq_lens_cpu_upper_bound=lengths[rows],
                block_table_tensor=common.block_table_tensor[rows],
                slot_mapping=common.slot_mapping[tokens],
                positions=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            )
            return RowsTogether(rows, tokens, super().build(0, part))

    return Builder


def impl_class(stock: type) -> type:
    """`stock`, an `AttentionImpl`, over what `in_full` makes of the cache."""
    scratch = _Scratch()

    class Impl(stock):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            _check(self)

        def in_full(
            self, layer: Any, kv_cache: Tensor, metadata: Any, rows: slice, query: Tensor
        ) -> tuple[Tensor, Tensor]:
            """The pages of these rows as the stock kernel reads them, and the rows' table of them.

            `query` says of which kind numbers are.
            """
            raise NotImplementedError

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            **scales: Any,
        ) -> Any:
            if attn_metadata is None:
                return super().forward(layer, query, key, value, kv_cache, None, output, **scales)
            everything = RowsTogether(slice(None), slice(None), attn_metadata)
            # The stock builder, which the self-test asks too, says nothing of parts.
            for part in getattr(attn_metadata, "store_parts", None) or [everything]:
                # Whoever asked for the metadata may have changed its table since, layer by layer.
                full, table = self.in_full(layer, kv_cache, attn_metadata, part.rows, query)
                metadata = copy.copy(part.metadata)
                metadata.block_table = table
                super().forward(
                    layer,
                    query[part.tokens],
                    key,
                    value,
                    full,
                    metadata,
                    output[part.tokens],
                    **scales,
                )
            return output

        def room(self, kv_cache: Tensor, pages: int, query: Tensor) -> Tensor:
            """So many uninitialised pages as stock ones, which the next layer will overwrite."""
            _, heads, page_tokens, _ = kv_cache.shape
            return scratch.pages((pages, heads, page_tokens, 2 * self.head_size), query)

        def fill(self, layer: Any, full: Tensor, pages: Tensor, read: ReadPages) -> None:
            """Let `full` hold what is `read` of these `pages`."""
            _, heads, page_tokens, _ = full.shape
            at_once = max(1, _CHUNK_BYTES // max(1, full[:1].nbytes))
            for start in range(0, len(pages), at_once):
                chunk = pages[start : start + at_once]
                keys, values = read(chunk)
                super().do_kv_cache_update(
                    layer,
                    _by_token(keys, heads),
                    _by_token(values, heads),
                    full[start : start + len(chunk)],
                    torch.arange(len(chunk) * page_tokens, device=pages.device),
                )

    return Impl


def lengths_on_host(common: Any) -> Tensor:
    """The tokens of each row of a step, on the host."""
    lengths: Tensor | None = common.seq_lens_cpu_upper_bound
    return common.seq_lens.cpu() if lengths is None else lengths


class _Scratch:
    """Room for pages in full precision, which each layer fills anew."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def pages(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised pages of this shape, of the kind of `like`."""
        size = torch.Size(shape).numel()
        if self._room.numel() < size or self._room.dtype != like.dtype:
            self._room = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._room[:size].view(shape)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """[pages x heads, n, width] as [pages x n, heads, width]."""
    return x.view(-1, heads, *x.shape[1:]).transpose(1, 2).reshape(-1, heads, x.shape[-1])


def _check(impl: Any) -> None:
    """Refuse a layer that does not read its own tokens from its own pages.

    Raises:
        BadInput: it says why.
    """
    why = None
    if impl.attn_type != "decoder":
        why = f"attends as {impl.attn_type}"
    elif impl.kv_sharing_target_layer_name is not None:
        why = "reads the KV cache of another layer"
    if why is not None:
        raise BadInput(
            f"kvtune's store cannot serve a layer that {why}",
            fix="take store out of kvtune's section of --additional-config for this model",
        )
