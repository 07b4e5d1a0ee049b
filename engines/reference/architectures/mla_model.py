"""A transformers DeepSeek model run over latent caches, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.reference.architectures.mla import (
    LatentAttention,
    LatentCache,
    LatentRotation,
)
from kvtune.engines.reference.rope import model_ropes
from kvtune.errors import BadInput

FAMILIES = ("deepseek_v2", "deepseek_v3")


@dataclass(slots=True)
class LatentSequence:
    """What is held of one sequence, a cache a layer."""

    caches: tuple[LatentCache, ...]

    @property
    def tokens(self) -> int:
        """How many tokens were processed."""
        return self.caches[0].tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.nbytes for cache in self.caches)


class LatentModel:
    """A DeepSeek-V2 or -V3 model whose attention reads latent rows.

    A prompt attends in expanded form, as prefill kernels do; decoding absorbs the projections, as
    decode kernels do. The experts are the model's own.
    """

    def __init__(self, model: Any) -> None:
        """Take a loaded transformers model.

        Raises:
            BadInput: another family, or frequencies that change with the sequence's length.
        """
        config = model.config
        if config.model_type not in FAMILIES:
            raise BadInput(
                f"{config.model_type!r} models have no latent attention that runs here",
                fix="it runs: " + ", ".join(FAMILIES),
            )
        self.model = model.eval().requires_grad_(False)
        blocks = model.model.layers
        inv_freq = model_ropes(model, ("full_attention",))[0].inv_freq
        # DeepSeek-V2's code has no other layout than neighbours.
        interleaved = bool(getattr(config, "rope_interleave", True))
        factor = float(model.model.rotary_emb.attention_scaling)
        rotation = LatentRotation(inv_freq, factor, interleaved)
        self.attention = tuple(LatentAttention(block.self_attn, rotation) for block in blocks)

    def start(self) -> LatentSequence:
        """Return an empty sequence."""
        return LatentSequence(tuple(layer.empty_cache() for layer in self.attention))

    def prefill(
        self, sequence: LatentSequence, prompt: Sequence[int], *, chunk_tokens: int | None = None
    ) -> Tensor:
        """Process a prompt, in pieces of at most `chunk_tokens`; return its logits [m, V].

        Raises:
            BadInput: it is empty.
        """
        if not prompt:
            raise BadInput("a prompt is empty", fix="give at least one token")
        size = chunk_tokens or len(prompt)
        pieces = [prompt[start : start + size] for start in range(0, len(prompt), size)]
        return torch.cat([self.forward(sequence, piece, absorbed=False) for piece in pieces])

    def decode(self, sequence: LatentSequence, tokens: Sequence[int]) -> Tensor:
        """Append generated tokens: logits [m, V]."""
        return self.forward(sequence, tokens, absorbed=True)

    @torch.inference_mode()
    def forward(self, sequence: LatentSequence, tokens: Sequence[int], *, absorbed: bool) -> Tensor:
        """Process tokens after those that the sequence holds: logits [m, V]."""
        model = self.model.model
        ids = torch.tensor([list(tokens)], device=self.model.device)
        hidden = model.embed_tokens(ids)
        for block, attention, cache in zip(
            model.layers, self.attention, sequence.caches, strict=True
        ):
            normed = block.input_layernorm(hidden)[0]
            hidden = hidden + attention.forward(normed, cache, absorbed=absorbed)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        logits: Tensor = self.model.lm_head(model.norm(hidden))[0]
        return logits
