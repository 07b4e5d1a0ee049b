"""Latent attention against transformers' own, and its two forms against each other."""

import pytest
import torch
from contracts.tiny_models import tiny_model, tokens

from kvtune.engines.reference.architectures.mla import LatentQueries
from kvtune.engines.reference.architectures.mla_model import LatentModel
from kvtune.errors import BadInput
from kvtune.policies.methods.mla import MultiHeadLatentAttention
from kvtune.policies.model_cache import read_model_cache

transformers = pytest.importorskip("transformers")

SIZES = {
    "first_k_dense_replace": 1,
    "hidden_size": 48,
    "intermediate_size": 64,
    "kv_lora_rank": 20,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 12,
    "vocab_size": 97,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_type": "yarn",
}
VARIANTS = {
    "v3": ("DeepseekV3", {}),
    "v3 in halves, full queries": ("DeepseekV3", {"rope_interleave": False, "q_lora_rank": None}),
    "v3 with yarn": ("DeepseekV3", {"rope_parameters": YARN}),
    "v2": ("DeepseekV2", {"topk_method": "greedy"}),
}
ROW_BYTES = (20 + 8) * 4
PROMPT = tokens(30)


def deepseek(variant):
    """A random model whose attention is far from uniform, in float32."""
    torch.set_num_threads(1)
    name, changes = VARIANTS[variant]
    config = getattr(transformers, name + "Config")(**{**SIZES, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
    for parameter, weight in model.named_parameters():
        if "self_attn" in parameter and weight.dim() == 2:
            weight.data *= 12
        if "layernorm" in parameter:
            weight.data = 1 + 0.3 * torch.randn_like(weight)
    model.lm_head.weight.data *= 5
    return model


@pytest.fixture(params=VARIANTS)
def model(request):
    return deepseek(request.param)


def stated(model):
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


@torch.no_grad()
def test_logits_are_those_of_transformers_in_prefill_chunks_and_decoding(model):
    expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.3
    runner = LatentModel(model)
    whole = runner.start()
    torch.testing.assert_close(runner.prefill(whole, PROMPT), expected, atol=1e-4, rtol=1e-4)
    pieces = runner.start()
    found = [runner.prefill(pieces, PROMPT[:20], chunk_tokens=7)]
    found += [runner.decode(pieces, [token]) for token in PROMPT[20:]]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
    assert pieces.nbytes == whole.nbytes


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100])
def test_a_token_takes_its_latent_and_its_rotary_key_and_nothing_else(count):
    model = deepseek("v3")
    runner = LatentModel(model)
    sequence = runner.start()
    runner.prefill(sequence, tokens(count))
    runner.decode(sequence, [5])
    assert sequence.nbytes == (count + 1) * 3 * ROW_BYTES
    config = stated(model)
    assert sequence.nbytes == read_model_cache(config).bytes_at(count + 1, element_bytes=4)
    per_token = MultiHeadLatentAttention().bytes_per_token(config, element_bytes=4)
    assert sequence.nbytes == (count + 1) * per_token


@torch.no_grad()
def test_the_caches_hold_what_transformers_holds():
    model = deepseek("v3")
    cache = transformers.DynamicCache(config=model.config)
    model(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)
    runner = LatentModel(model)
    sequence = runner.start()
    runner.prefill(sequence, PROMPT)
    for own, theirs in zip(sequence.caches, cache.layers, strict=True):
        torch.testing.assert_close(own.latents, theirs.keys[0, 0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.rope_keys, theirs.values[0, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("asked", [1, 3, 9])
def test_absorbed_attention_equals_expanded(asked):
    layer = LatentModel(deepseek("v3")).attention[1]
    cache = layer.empty_cache()
    generator = torch.Generator().manual_seed(0)
    cache.append(torch.randn(9, 20, generator=generator), torch.randn(9, 8, generator=generator))
    queries = LatentQueries(
        torch.randn(4, asked, 16, generator=generator),
        torch.randn(4, asked, 8, generator=generator),
    )
    positions = torch.arange(9 - asked, 9)
    expanded = layer.expanded(queries, cache, positions)
    absorbed = layer.absorbed(queries, cache, positions)
    assert expanded.shape == (4, asked, 12)
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


def test_absorbed_attention_is_softmax_over_rows():
    layer = LatentModel(deepseek("v3")).attention[0]
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(6, 20, generator=generator)
    rope_keys = torch.randn(6, 8, generator=generator)
    nope = torch.randn(4, 1, 16, generator=generator)
    rope = torch.randn(4, 1, 8, generator=generator)
    cache = layer.empty_cache()
    cache.append(latents, rope_keys)
    found = layer.absorbed(LatentQueries(nope, rope), cache, torch.tensor([5]))
    up = layer.block.kv_b_proj.weight.reshape(4, 16 + 12, 20)
    for head in range(4):
        key = torch.cat((latents @ up[head, :16].T, rope_keys), dim=1)
        query = torch.cat((nope[head, 0], rope[head, 0]))
        weights = (key @ query / (16 + 8) ** 0.5).softmax(0)
        expected = weights @ (latents @ up[head, 16:].T)
        torch.testing.assert_close(found[head, 0], expected, atol=1e-5, rtol=1e-5)


def test_other_models_and_empty_prompts_are_refused():
    with pytest.raises(BadInput, match="'llama' models have no latent attention"):
        LatentModel(tiny_model())
    runner = LatentModel(deepseek("v3"))
    with pytest.raises(BadInput, match="empty"):
        runner.prefill(runner.start(), [])
