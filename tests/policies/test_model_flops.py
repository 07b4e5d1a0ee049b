"""Arithmetic of a token against a count of its matrices by hand."""

import pytest

from kvtune.policies.model_flops import token_flops_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LAYER_NUMBERS = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
"""Query and output, key and value, and the three of the feed-forward block."""


@pytest.mark.parametrize("tied", [True, False])
def test_a_multiply_add_is_counted_for_each_number_of_each_matrix(tied):
    found = token_flops_of({**LLAMA, "tie_word_embeddings": tied})
    assert found.layers_flop == pytest.approx(2 * 30 * LAYER_NUMBERS, rel=1e-3)
    assert found.head_flop == 2 * 49152 * 576, "looking up a row is no arithmetic"
    # Scores and values: two products of 9 heads of 64 numbers, in 30 layers.
    assert found.context_flop == 2 * 2 * 30 * 9 * 64


def test_learned_positions_are_looked_up_and_not_multiplied():
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{"n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 4096, "vocab_size": 40},
    }
    matrices = 3 * (4 * 24 * 24 + 2 * 24 * 96)
    # A model this small is to a fourteenth scales and biases.
    assert token_flops_of(gpt2).layers_flop == pytest.approx(2 * matrices, rel=0.08)


def test_a_step_that_decodes_attends_to_all_contexts():
    found = token_flops_of(LLAMA)
    by_hand = 4 * (found.layers_flop + found.head_flop) + 4000 * found.context_flop
    assert found.decode_flop(4, 4000) == by_hand


def test_prompts_attend_to_what_came_before_and_need_no_head():
    found = token_flops_of(LLAMA)
    one_by_one = sum(
        found.layers_flop + (300 + index + 0.5) * found.context_flop for index in range(200)
    )
    assert found.prefill_flop(200, 300) == pytest.approx(one_by_one)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**LLAMA, "architectures": ["SomethingElse"]},
        {
            **LLAMA,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {
            **LLAMA,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 4096,
        },
    ],
    ids=["nothing", "unknown", "experts", "window"],
)
def test_what_does_not_follow_from_the_config_is_not_known(config):
    assert token_flops_of(config) is None
