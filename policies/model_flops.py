"""How much arithmetic a token takes, from a model's `config.json` alone.

The count of the PaLM paper (arXiv 2204.02311, appendix B), forward pass only: a multiply-add for
each number of each matrix, and attention to every token of the context. Scales and biases count as
if they were matrices, which is under 0.1%.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.model_families import find_family
from kvtune.policies.model_layers import Kind, Rows
from kvtune.policies.model_parameters import RECIPES, parameters_of

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries of models whose tokens pass through a few of their experts only."""


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Floating-point operations of one token on all devices together; a multiply-add is two.

    `layers_flop` are those of the layers' matrices, `head_flop` those of the output head, which a
    token needs only if another one is chosen after it, and `context_flop` those of attention for
    each token of its context.
    """

    layers_flop: float
    head_flop: float
    context_flop: float

    def decode_flop(self, sequences: float, context_tokens: float) -> float:
        """A token for each of `sequences`, which hold `context_tokens` together."""
        return sequences * (self.layers_flop + self.head_flop) + context_tokens * self.context_flop

    def prefill_flop(self, tokens: float, before_tokens: float = 0.0) -> float:
        """`tokens` of a prompt after `before_tokens` of it; each attends to those before it."""
        context_tokens = tokens * (before_tokens + tokens / 2)
        return tokens * self.layers_flop + context_tokens * self.context_flop


def token_flops_of(config: Mapping[str, Any]) -> TokenFlops | None:
    """Count them; None where they do not follow from the config.

    That is so for families that are not known exactly, for experts, and for layers that do not
    attend to all tokens with separate heads.
    """
    parameters = parameters_of(config)
    if parameters is None or any(config.get(name) for name in EXPERTS):
        return None
    try:
        _, model = find_family(config, "the model config")
        cache = read_model_cache(config)
        hidden = model.count(model.spelling.hidden)
        recipe = RECIPES[model.architecture]
        embedding = model.count("vocab_size") * hidden
        layers = parameters - embedding
        if not model.get("tie_word_embeddings", recipe.tied):
            layers -= embedding
        if recipe.positions:
            layers -= model.count(model.spelling.max_tokens) * hidden
    except BadInput:
        return None
    context = 0
    for layer in cache.layers:
        for held in layer:
            if not isinstance(held, Rows) or held.kind is not Kind.FULL or not held.value_dim:
                return None
            context += model.query_heads * (held.key_dim + held.value_dim)
    return TokenFlops(2.0 * layers, 2.0 * embedding, 2.0 * context)
