"""How many parameters a model has, and their bytes as served, from its `config.json` alone.

The counts are those of the transformers 5.19 modelling classes without buffers (the correction
biases of some routers, one number an expert) and without layers for multi-token prediction. An
engine adds little: vLLM pads the vocabulary to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.model_attention import indexed_layers
from kvtune.policies.model_config import SERVED_DTYPE_BYTES, ModelConfig
from kvtune.policies.model_families import find_family


def parameters_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of parameters; tied embeddings count once.

    None where the architecture, or what its config says, is not known exactly. That includes
    checkpoints with a vision tower.
    """
    try:
        _, model = find_family(config, "the model config")
        recipe = RECIPES.get(model.architecture)
        return None if recipe is None else _total(model, recipe)
    except BadInput:
        return None


def weight_bytes_of(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of the weights on all devices together, served in 16 bits.

    None where `parameters_of` is, and for a quantised checkpoint: its config does not say in which
    format each weight is.
    """
    if config.get("quantization_config") or config.get("compression_config"):
        return None
    parameters = parameters_of(config)
    return None if parameters is None else parameters * SERVED_DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether a family has something: as the entry `key` says, else as `default`."""

    key: str | None
    default: bool

    def on(self, config: ModelConfig) -> bool:
        """Return what the config says, or the default where it is silent."""
        return self.default if self.key is None else bool(config.get(self.key, self.default))


NEVER = Switch(None, False)
ALWAYS = Switch(None, True)
ATTENTION_BIAS = Switch("attention_bias", False)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the layers of a family are made of.

    Args:
        feed_forward: parameters of one feed-forward block, router and experts included, by layer.
        attention: parameters of one attention block, its inner norms included, by layer.
        norms: layer norms in a layer; one more follows the last layer.
        norm_numbers: numbers of a norm for each channel: 1 for a scale, 2 with a shift, 0 for none.
        tied: whether output and input embeddings are one where the config does not say.
        positions: True for learned positions.
    """

    feed_forward: Callable[[ModelConfig, int], int]
    attention: Callable[[ModelConfig, int], int]
    norms: int = 2
    norm_numbers: int = 1
    tied: bool = False
    positions: bool = False


def _total(config: ModelConfig, recipe: Recipe) -> int:
    hidden = config.count(config.spelling.hidden)
    embeddings = config.count("vocab_size") * hidden
    if not config.get("tie_word_embeddings", recipe.tied):
        embeddings *= 2
    if recipe.positions:
        embeddings += config.count(config.spelling.max_tokens) * hidden
    norms = (recipe.norms * config.layers + 1) * recipe.norm_numbers * hidden
    layers = sum(
        recipe.attention(config, index) + recipe.feed_forward(config, index)
        for index in range(config.layers)
    )
    return embeddings + norms + layers


def _heads(
    *,
    bias: Switch = NEVER,
    output_bias: Switch | None = None,
    head_norms: bool = False,
    wide_norms: bool = False,
    sinks: bool = False,
) -> Callable[[ModelConfig, int], int]:
    """Attention with separate heads; the output has a bias as the inputs do, unless given.

    Norms of queries and keys are one for all heads (`head_norms`) or over all of them.
    """

    at_output = bias if output_bias is None else output_bias

    def count(config: ModelConfig, _layer: int) -> int:
        hidden = config.count(config.spelling.hidden)
        queries = config.query_heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        inputs = queries + 2 * keys
        weights = hidden * inputs + queries * hidden
        biases = inputs * bias.on(config) + hidden * at_output.on(config)
        norms = 2 * config.head_dim * head_norms + (queries + keys) * wide_norms
        return weights + biases + norms + config.query_heads * sinks

    return count


def _gated(bias: Switch = NEVER) -> Callable[[ModelConfig, int], int]:
    """Three matrices: gate, up and down."""

    def count(config: ModelConfig, _layer: int) -> int:
        hidden, inner = config.count("hidden_size"), config.count("intermediate_size")
        return 3 * hidden * inner + (2 * inner + hidden) * bias.on(config)

    return count


def _plain(bias: Switch = NEVER) -> Callable[[ModelConfig, int], int]:
    """Two matrices: up and down; the inner width is four times the hidden where not stated."""

    def count(config: ModelConfig, _layer: int) -> int:
        hidden = config.count(config.spelling.hidden)
        key = "n_inner" if config.spelling.hidden == "n_embd" else "intermediate_size"
        inner = config.count_or(key, 4 * hidden)
        return 2 * hidden * inner + (inner + hidden) * bias.on(config)

    return count


def _mixtral(config: ModelConfig, _layer: int) -> int:
    hidden, experts = config.count("hidden_size"), config.count("num_local_experts")
    return experts * (hidden + 3 * hidden * config.count("intermediate_size"))


def _gpt_oss(config: ModelConfig, _layer: int) -> int:
    hidden, inner = config.count("hidden_size"), config.count("intermediate_size")
    expert = 3 * hidden * inner + 2 * inner + hidden
    return config.count("num_local_experts") * (hidden + 1 + expert)


def _qwen_moe(config: ModelConfig, layer: int) -> int:
    hidden = config.count("hidden_size")
    dense_layers = config.get("mlp_only_layers", [])
    experts = config.count("num_experts")
    if not isinstance(dense_layers, list):
        raise config.refusal("its mlp_only_layers is not a list")
    if layer in dense_layers or (layer + 1) % config.count_or("decoder_sparse_step", 1):
        return 3 * hidden * config.count("intermediate_size")
    return experts * (hidden + 3 * hidden * config.count("moe_intermediate_size"))


def _deepseek_moe(config: ModelConfig, layer: int) -> int:
    hidden = config.count("hidden_size")
    if config.get("moe_layer_freq", 1) != 1 or config.get("mlp_bias"):
        raise config.refusal("its experts are of an unknown make")
    dense_layers = config.get("first_k_dense_replace")
    if not isinstance(dense_layers, int):
        raise config.refusal("it does not state first_k_dense_replace")
    if layer < dense_layers:
        return 3 * hidden * config.count("intermediate_size")
    experts, inner = config.count("n_routed_experts"), config.count("moe_intermediate_size")
    shared = config.count("n_shared_experts")
    return experts * hidden + (experts + shared) * 3 * hidden * inner


def _latent(config: ModelConfig, layer: int) -> int:
    """Multi-head latent attention, with an indexer in the layers that have one."""
    hidden, heads = config.count("hidden_size"), config.query_heads
    rank, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    plain_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    bias = ATTENTION_BIAS.on(config)
    keys = hidden * (rank + rope) + rank + rank * heads * (plain_dim + value_dim)
    keys += (rank + rope) * bias
    output = heads * value_dim * hidden + hidden * bias
    query_inputs = hidden
    queries = 0
    if config.get("q_lora_rank") is not None:
        query_inputs = config.count("q_lora_rank")
        queries = hidden * query_inputs + query_inputs * bias + query_inputs
    queries += query_inputs * heads * (plain_dim + rope)
    total = keys + output + queries
    if config.get("index_topk") and indexed_layers(config)[layer]:
        index_heads, index_dim = config.count("index_n_heads"), config.count("index_head_dim")
        total += query_inputs * index_heads * index_dim
        total += hidden * (index_dim + index_heads) + 2 * index_dim
    return total


ATTENTION = _heads(bias=ATTENTION_BIAS)
NORMED_ATTENTION = _heads(bias=ATTENTION_BIAS, head_norms=True)
WIDE_NORMED_ATTENTION = _heads(bias=ATTENTION_BIAS, wide_norms=True)
INPUT_BIAS = _heads(bias=Switch("attention_bias", True), output_bias=NEVER)
MLP_BIAS = Switch("mlp_bias", False)
USE_BIAS = Switch("use_bias", True)
LLAMA = Recipe(_gated(MLP_BIAS), ATTENTION)
DEEPSEEK = Recipe(_deepseek_moe, _latent)

RECIPES: Mapping[str, Recipe] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GPT2LMHeadModel": Recipe(
        _plain(ALWAYS), _heads(bias=ALWAYS), norm_numbers=2, tied=True, positions=True
    ),
    "Gemma2ForCausalLM": Recipe(_gated(), ATTENTION, norms=4, tied=True),
    "Gemma3ForCausalLM": Recipe(_gated(), NORMED_ATTENTION, norms=4, tied=True),
    "GemmaForCausalLM": Recipe(_gated(), ATTENTION, tied=True),
    "Glm4ForCausalLM": Recipe(_gated(), INPUT_BIAS, norms=4),
    "GlmForCausalLM": Recipe(_gated(), INPUT_BIAS),
    "GlmMoeDsaForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": Recipe(_gpt_oss, _heads(bias=Switch("attention_bias", True), sinks=True)),
    "GraniteForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": Recipe(_gated(), _heads()),
    "MixtralForCausalLM": Recipe(_mixtral, _heads()),
    "Olmo2ForCausalLM": Recipe(_gated(), WIDE_NORMED_ATTENTION),
    "Olmo3ForCausalLM": Recipe(_gated(), WIDE_NORMED_ATTENTION),
    "Phi3ForCausalLM": Recipe(_gated(), _heads()),
    "Qwen2ForCausalLM": Recipe(_gated(), _heads(bias=ALWAYS, output_bias=NEVER)),
    "Qwen3ForCausalLM": Recipe(_gated(), NORMED_ATTENTION),
    "Qwen3MoeForCausalLM": Recipe(_qwen_moe, NORMED_ATTENTION),
    "SmolLM3ForCausalLM": Recipe(_gated(MLP_BIAS), ATTENTION, tied=True),
    "Starcoder2ForCausalLM": Recipe(
        _plain(USE_BIAS), _heads(bias=USE_BIAS), norm_numbers=2, tied=True
    ),
}
