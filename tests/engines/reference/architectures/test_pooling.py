"""Mean-pooled KV heads: exact where heads are alike, a loss where they are not."""

import pytest
import torch
from contracts.tiny_models import follow, tiny_model, tokens

from kvtune.engines.reference.architectures.pooling import pool_kv_heads, pooled_model
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.errors import BadInput
from kvtune.policies.method_stack import MethodStack

PROMPT, CONTINUATION = tokens(20), tokens(4, 1)


def run(model):
    rows, sequence = follow(ReferenceEngine(model), MethodStack(), PROMPT, CONTINUATION)
    return rows, sequence.measured().resident_bytes


def alike(model, group):
    """The model with the KV heads of each group made those of its first."""
    for block in model.model.layers:
        for projection in (block.self_attn.k_proj, block.self_attn.v_proj):
            for tensor in (projection.weight, projection.bias):
                if tensor is not None:
                    heads = tensor.data.reshape(4 // group, group, 32, -1)
                    heads[:] = heads[:, :1].clone()
    return model


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config"])
def test_heads_that_are_alike_pool_without_loss(config, kv_heads):
    model = tiny_model(config, num_key_value_heads=4)
    for block in model.model.layers:
        if block.self_attn.k_proj.bias is not None:
            torch.nn.init.normal_(block.self_attn.k_proj.bias)
            torch.nn.init.normal_(block.self_attn.v_proj.bias)
    alike(model, 4 // kv_heads)
    small = pooled_model(model, kv_heads)
    found, few = run(small)
    expected, many = run(model)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert few * 4 == many * kv_heads


def test_heads_that_differ_pool_at_a_loss_and_the_model_is_left_alone():
    model = tiny_model(num_key_value_heads=4)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found, _ = run(pooled_model(model, 1))
    expected, _ = run(model)
    assert (found - expected).abs().max() > 0.1 * expected.std()
    assert model.config.num_key_value_heads == 4
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_a_projection_of_neighbouring_heads_is_averaged():
    # Four heads of two rows: 0 1, 2 3, 4 5, 6 7.
    weight = torch.arange(8.0)[:, None] * torch.tensor([1.0, 10.0])
    pooled = pool_kv_heads(weight, 4, 2)
    assert pooled.tolist() == [[1.0, 10.0], [2.0, 20.0], [5.0, 50.0], [6.0, 60.0]]
    assert pool_kv_heads(torch.arange(8.0), 4, 1).tolist() == [3.0, 4.0]
    assert torch.equal(pool_kv_heads(weight, 4, 4), weight)


@pytest.mark.parametrize("kv_heads", [0, 3, 8])
def test_heads_that_do_not_divide_are_refused(kv_heads):
    with pytest.raises(BadInput, match="4 KV heads do not pool"):
        pooled_model(tiny_model(num_key_value_heads=4), kv_heads)


def test_other_families_are_refused():
    class Other:
        class config:
            model_type = "gpt2"

    with pytest.raises(BadInput, match="gpt2"):
        pooled_model(Other(), 1)
