"""What one layer of a model keeps for one sequence, in bytes.

Sizes follow the specifications of vLLM 0.32 (`v1/kv_cache_interface.py`, and
`model_executor/layers/mamba/mamba_utils.py` for states). They count what the attention needs: no
rounding to blocks, and no packed number formats with their own scales (`fp8_ds_mla`, NVFP4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from kvtune.errors import BadInput


class Kind(StrEnum):
    """What a layer keeps, named after which tokens it keeps it for."""

    FULL = "full"
    """A key and a value of every token."""
    WINDOW = "window"
    """The same of the last `span_tokens` tokens."""
    CHUNK = "chunk"
    """The same of the current chunk of `span_tokens` tokens."""
    LATENT = "latent"
    """One vector of every token for all heads together (MLA)."""
    COMPRESSED = "compressed"
    """One vector for every `tokens_per_row` tokens."""
    INDEX = "index"
    """A small key of every token, by which sparse attention picks what it reads."""
    STATE = "state"
    """Bytes that do not grow with the sequence, beyond a few tokens."""
    SHARED = "shared"
    """Nothing: it reads the cache of another layer."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of numbers that a layer keeps: `heads x (key_dim + value_dim)` numbers each.

    Args:
        kind: which rows these are.
        heads: key and value heads. A cache of one head is held whole by every rank.
        key_dim: numbers of a key for each head.
        value_dim: the same of a value; 0 where the value is read out of the key.
        span_tokens: how many of the last tokens can still be read; None is all of them.
        tokens_per_row: how many tokens go into one row.
        number_bytes: bytes of one number where the cache's format does not set them.
        read_rows: the most rows that a step reads; None is all of them.
        owned: False for a layer that reads rows which another layer keeps.
    """

    kind: Kind
    heads: int
    key_dim: int
    value_dim: int = 0
    span_tokens: int | None = None
    tokens_per_row: int = 1
    number_bytes: int | None = None
    read_rows: int | None = None
    owned: bool = True

    def resident_bytes(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return what a sequence that has grown to `tokens` tokens needs on one rank."""
        if not self.owned:
            return 0
        held_tokens = tokens if self.span_tokens is None else min(tokens, self.span_tokens)
        rows = held_tokens // self.tokens_per_row
        return rows * self._row_bytes(element_bytes, tensor_parallel)

    def read_bytes(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return what a decode step reads on one rank when its own token is the last of `tokens`.

        At the start of a chunk that is little, although a whole chunk is needed later.
        """
        seen_tokens = tokens
        if self.span_tokens is not None and tokens:
            in_chunk = (tokens - 1) % self.span_tokens + 1
            window = min(tokens, self.span_tokens)
            seen_tokens = in_chunk if self.kind is Kind.CHUNK else window
        rows = seen_tokens // self.tokens_per_row
        rows = rows if self.read_rows is None else min(rows, self.read_rows)
        return rows * self._row_bytes(element_bytes, tensor_parallel)

    def shared(self) -> Rows:
        """Return the same rows as a layer sees them that reads another's."""
        return replace(self, kind=Kind.SHARED, owned=False)

    def _row_bytes(self, element_bytes: int, tensor_parallel: int) -> int:
        heads = _heads_on_rank(self.heads, tensor_parallel)
        return heads * (self.key_dim + self.value_dim) * (self.number_bytes or element_bytes)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of `heads x head_numbers`, and the inputs of a causal convolution.

    The convolution needs its last `columns` inputs (its width less one) of `channels` channels and
    of `groups x group_channels` more. Both parts keep their number format whatever the KV cache's.

    Formulas, per layer, as `MambaStateShapeCalculator` of vLLM has them:

    - Mamba (arXiv 2312.00752): state `E x N`, convolution `E x (k - 1)`, with `E` inner channels,
      `N` state numbers for each and a convolution of width `k`.
    - Mamba 2 (arXiv 2405.21060): state `H x P x N`, convolution `(H P + 2 G N) x (k - 1)`, with `H`
      heads of `P` channels and `G` groups. One group is held by every rank.
    - Gated delta net (arXiv 2412.06464): state `Hv x dv x dk`, convolution
      `(2 Hk dk + Hv dv) x (k - 1)`.
    - Gated retention (YOCO, arXiv 2405.05254): state `H x d x d`, no convolution.

    transformers keeps one more column of the convolution than vLLM, which is not counted here.
    """

    heads: int
    head_numbers: int
    head_number_bytes: int
    channels: int = 0
    groups: int = 0
    group_channels: int = 0
    columns: int = 0
    column_number_bytes: int = 0

    @property
    def kind(self) -> Kind:
        """Always `STATE`."""
        return Kind.STATE

    def resident_bytes(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return the bytes of the state on one rank; `tokens` and `element_bytes` do not matter."""
        ranks = tensor_parallel
        heads = _share(self.heads, ranks, "heads of a recurrent state")
        replicated = self.groups == 1
        groups = ranks if replicated else self.groups
        if not replicated:
            _share(self.groups, ranks, "groups of a recurrent state")
        channels = self.channels + groups * self.group_channels
        columns = _share(channels, ranks, "convolution channels") * self.columns
        return heads * self.head_numbers * self.head_number_bytes + (
            columns * self.column_number_bytes
        )

    def read_bytes(self, tokens: int, element_bytes: int, tensor_parallel: int) -> int:
        """Return what a decode step reads on one rank: the whole state."""
        return self.resident_bytes(tokens, element_bytes, tensor_parallel)


LayerCache: TypeAlias = Rows | State
Layers: TypeAlias = list[tuple[LayerCache, ...]]
"""One entry a layer: all that it keeps, nothing for one without attention."""


def _heads_on_rank(heads: int, ranks: int) -> int:
    if ranks % heads == 0:
        return 1
    return _share(heads, ranks, "KV heads")


def _share(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise BadInput(
            f"{count} {what} do not divide over {ranks} ranks",
            fix="choose a tensor-parallel size that divides them",
        )
    return count // ranks
