import pytest
from contracts import model_samples
from contracts.model_samples import LLAMA_8B

from kvtune.errors import BadInput
from kvtune.policies.model_cache import read_model_cache
from kvtune.policies.model_config import MOST_LAYERS, TRAPS
from kvtune.policies.model_families import FAMILIES, NESTED
from kvtune.policies.model_parameters import parameters_of

CONFIGS = [value for name, value in sorted(vars(model_samples).items()) if name.isupper()]
MOE = {**LLAMA_8B, "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 8}
MOE |= {"mlp_only_layers": [], "moe_intermediate_size": 8, "num_experts": 4}
JUNK = (None, "x", -1, 0, 1.5, [], {}, True, [1], ["x"], {"x": 1}, 10**9)


def variants(config):
    """The config with every entry, those of its decoder too, replaced by nonsense."""
    extra = ("dtype", "layer_types", "quantization_config", "sliding_window", "index_topk_freq")
    for key in (*config, *extra, "index_skip_topk_offset", "index_topk_pattern"):
        for junk in JUNK:
            yield {**config, key: junk}
    if "text_config" in config:
        for text in variants(config["text_config"]):
            yield {**config, "text_config": text}


@pytest.mark.parametrize("config", [*CONFIGS, MOE], ids=lambda each: each["architectures"][0])
def test_nonsense_is_counted_or_refused_and_never_crashes(config):
    assert read_model_cache(config).bytes_at(100) > 0
    refused = 0
    for variant in variants(config):
        try:
            assert read_model_cache(variant).bytes_at(100) >= 0
        except BadInput:
            refused += 1
        parameters = parameters_of(variant)
        assert parameters is None or parameters > 0
    assert refused > 20


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trap_is_refused_by_every_family_that_does_not_read_it(name):
    traps = [key for key in TRAPS if key not in FAMILIES[name].understands]
    assert len(traps) > len(TRAPS) - 5
    for key in traps:
        text = {**LLAMA_8B, "architectures": [name], key: 2}
        config = {"architectures": [name], "text_config": text} if name in NESTED else text
        with pytest.raises(BadInput, match=f"its {key} means"):
            read_model_cache(config)


def test_more_layers_than_any_model_has_are_refused():
    assert len(read_model_cache({**LLAMA_8B, "num_hidden_layers": MOST_LAYERS}).layers) == 4096
    with pytest.raises(BadInput, match="its num_hidden_layers is 4097"):
        read_model_cache({**LLAMA_8B, "num_hidden_layers": MOST_LAYERS + 1})


def test_the_decoder_of_a_nested_config_takes_what_holds_for_the_whole():
    nested = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**LLAMA_8B, "head_dim": 128},
    }
    assert read_model_cache(nested).bytes_per_token() == 131_072
    scheme = {"kv_cache_scheme": {"num_bits": 8}}
    with pytest.raises(BadInput, match="its own KV cache format"):
        read_model_cache({**nested, "quantization_config": scheme})
