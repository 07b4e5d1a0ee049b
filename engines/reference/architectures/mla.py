"""Multi-head latent attention over its latent cache (DeepSeek-V2, 2405.04434).

A token's row is a normalised latent `c` [dc] and a rotated key `k_rope` [dr], shared by all heads.
Head i has the key `[W_UK,i c ; k_rope]` and the value `W_UV,i c`. Expanded attention builds these
for all tokens. Absorbed attention moves the projections to the other side: the query becomes
`W_UK,iᵀ q_nope`, scores are taken with latents, and `W_UV,i` is applied to what is read of them,
so that the cache works like one KV head of dc + dr numbers whose value is its first dc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.reference.attention import attend
from kvtune.kernels.rope import apply_rope, cos_sin


class LatentCache:
    """The rows of one layer of one sequence: latents [n, dc] and rotated keys [n, dr]."""

    def __init__(self, latents: Tensor, rope_keys: Tensor) -> None:
        self.latents = latents
        self.rope_keys = rope_keys

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self.latents)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.latents.nbytes + self.rope_keys.nbytes

    def append(self, latents: Tensor, rope_keys: Tensor) -> None:
        """Add rows [m, dc] and [m, dr]."""
        self.latents = torch.cat((self.latents, latents))
        self.rope_keys = torch.cat((self.rope_keys, rope_keys))


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Queries of new tokens: `nope` [H, m, dn] for latents, `rope` [H, m, dr] rotated."""

    nope: Tensor
    rope: Tensor


@dataclass(frozen=True, slots=True)
class LatentRotation:
    """A model's rotation of `rope` parts: inverse frequencies [dr / 2], factor, and layout.

    `interleaved` weights pair neighbouring channels; they are brought into halves, which permutes
    queries and keys alike and changes no score.
    """

    inv_freq: Tensor
    factor: float
    interleaved: bool

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [..., m, dr] to positions [m]."""
        if self.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return apply_rope(x, *cos_sin(self.inv_freq, positions, self.factor))


class LatentAttention:
    """One attention layer of a transformers DeepSeek-V2 or -V3 model, with its weights."""

    def __init__(self, block: Any, rotation: LatentRotation) -> None:
        """Take the `self_attn` module of a layer."""
        self.block = block
        self.rotation = rotation
        self.latent_dim: int = block.kv_lora_rank
        self.rope_dim: int = block.qk_rope_head_dim
        self.nope_dim: int = block.qk_nope_head_dim
        up = block.kv_b_proj.weight.detach().reshape(block.num_heads, -1, self.latent_dim)
        self.key_up = up[:, : self.nope_dim]
        self.value_up = up[:, self.nope_dim :]

    def empty_cache(self) -> LatentCache:
        """A cache of no tokens."""
        like = self.block.kv_b_proj.weight
        return LatentCache(like.new_empty(0, self.latent_dim), like.new_empty(0, self.rope_dim))

    def forward(self, hidden: Tensor, cache: LatentCache, *, absorbed: bool) -> Tensor:
        """Append new tokens to the cache and attend: [m, hidden] in and out."""
        first = cache.tokens
        positions = torch.arange(first, first + len(hidden), device=hidden.device)
        queries = self._queries(hidden, positions)
        down = self.block.kv_a_proj_with_mqa(hidden)
        latents, rope_keys = down.split((self.latent_dim, self.rope_dim), dim=-1)
        rotated = self.rotation.rotate(rope_keys, positions)
        cache.append(self.block.kv_a_layernorm(latents), rotated)
        read = self.absorbed if absorbed else self.expanded
        out = read(queries, cache, positions)
        projected: Tensor = self.block.o_proj(out.transpose(0, 1).flatten(1))
        return projected

    def expanded(self, queries: LatentQueries, cache: LatentCache, positions: Tensor) -> Tensor:
        """Attend to the keys and values of every head: [H, m, dv]."""
        heads, held = len(self.key_up), cache.tokens
        rope_keys = cache.rope_keys.expand(heads, held, -1)
        keys = torch.cat((cache.latents @ self.key_up.mT, rope_keys), dim=-1)
        values = cache.latents @ self.value_up.mT
        return self._attend(queries.nope, queries.rope, keys, values, positions)

    def absorbed(self, queries: LatentQueries, cache: LatentCache, positions: Tensor) -> Tensor:
        """Attend to the rows themselves: [H, m, dv]."""
        keys = torch.cat((cache.latents, cache.rope_keys), dim=-1)[None]
        nope = queries.nope @ self.key_up
        read = self._attend(nope, queries.rope, keys, cache.latents[None], positions)
        out: Tensor = read @ self.value_up.mT
        return out

    def _attend(
        self, nope: Tensor, rope: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:
        held_at = torch.arange(keys.shape[1], device=keys.device)[None]
        return attend(
            torch.cat((nope, rope), dim=-1),
            keys,
            values,
            positions,
            held_at,
            scale=self.block.scaling,
        )

    def _queries(self, hidden: Tensor, positions: Tensor) -> LatentQueries:
        block = self.block
        if block.q_lora_rank is None:
            flat = block.q_proj(hidden)
        else:
            flat = block.q_b_proj(block.q_a_layernorm(block.q_a_proj(hidden)))
        split = flat.reshape(len(hidden), block.num_heads, -1).transpose(0, 1)
        nope, rope = split.split((self.nope_dim, self.rope_dim), dim=-1)
        return LatentQueries(nope, self.rotation.rotate(rope, positions))
