"""YOCO: caches against a pass without any, the early exit of a prompt, and bytes."""

import dataclasses

import pytest
import torch
from contracts.tiny_models import tokens

from kvtune.engines.reference.architectures.yoco import YocoModel, YocoShape
from kvtune.errors import BadInput
from kvtune.policies.methods.yoco import YouOnlyCacheOnce
from kvtune.policies.model_cache import read_model_cache

SHAPE = YocoShape()
WINDOW = SHAPE.sliding_window


def stated(shape):
    """The config.json of a checkpoint of this shape."""
    layers = shape.num_self_decoder_layers + shape.num_cross_decoder_layers
    return {
        **dataclasses.asdict(shape),
        "architectures": ["YOCOForCausalLM"],
        "num_hidden_layers": layers,
        "num_kv_cache_layers": 1,
    }


def sharp_model(shape=SHAPE):
    """A random model whose attention is far from uniform."""
    torch.set_num_threads(1)
    model = YocoModel(shape)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 4
    return model


def split(x, heads):
    return x.reshape(len(x), heads, -1).transpose(0, 1)


def rotated(x, theta):
    """RoPE at positions 0 to n - 1 of [H, n, d], as complex numbers of two halves."""
    count, dim = x.shape[1:]
    angles = torch.outer(torch.arange(count), theta ** -(torch.arange(0, dim, 2) / dim))
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_attention(queries, keys, values, window):
    count = queries.shape[1]
    keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
    values = values.repeat_interleave(len(queries) // len(values), dim=0)
    distance = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (distance < 0) | (distance >= window)
    scores = queries @ keys.mT / queries.shape[-1] ** 0.5
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@torch.no_grad()
def recomputed(model, ids):
    """Logits of every token, by full attention matrices and without any cache."""
    shape = model.shape
    hidden = model.embed(torch.tensor(ids))
    for layer in model.self_layers:
        normed = layer.attention_norm(hidden)
        queries, keys, values = (
            split(project(normed), shape.n_self_heads)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        queries, keys = rotated(queries, shape.rope_theta), rotated(keys, shape.rope_theta)
        hidden = layer.finish(hidden, plain_attention(queries, keys, values, WINDOW))
    normed = model.kv_norm(hidden)
    keys = rotated(split(model.k_proj(normed), shape.num_key_value_heads), shape.rope_theta)
    values = split(model.v_proj(normed), shape.num_key_value_heads)
    for layer in model.cross_layers:
        queries = split(layer.q_proj(layer.attention_norm(hidden)), shape.num_attention_heads)
        attended = plain_attention(rotated(queries, shape.rope_theta), keys, values, len(ids))
        hidden = layer.finish(hidden, attended)
    return model.lm_head(model.norm(hidden))


@pytest.mark.parametrize("prompt_tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 30])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_decoding_equals_a_pass_without_caches(prompt_tokens, chunk_tokens):
    model = sharp_model()
    ids = tokens(prompt_tokens + 6)
    expected = recomputed(model, ids)
    sequence = model.start()
    last = model.prefill(sequence, ids[:prompt_tokens], chunk_tokens=chunk_tokens)
    rows = [last] + [model.decode(sequence, [token])[0] for token in ids[prompt_tokens:]]
    found = torch.stack(rows)
    torch.testing.assert_close(found, expected[prompt_tokens - 1 :], atol=1e-4, rtol=1e-4)


def test_a_window_and_a_cache_matter_to_this_model():
    model = sharp_model()
    ids = tokens(30)
    other = [ids[0] + 1, *ids[1:]]
    assert (recomputed(model, ids)[-1] - recomputed(model, other)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_a_prompt_leaves_the_cross_decoder_early_and_ends_the_same(chunk_tokens):
    model = sharp_model()
    ids = tokens(30)
    early, late = model.start(), model.start()
    found = model.prefill(early, ids, chunk_tokens=chunk_tokens)
    expected = model.prefill(late, ids, chunk_tokens=chunk_tokens, early_exit=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # 2 layers of 30 tokens and 2 of one, against 4 layers of 30.
    assert (early.token_layers, late.token_layers) == (2 * 30 + 2, 4 * 30)
    assert early.nbytes == late.nbytes
    torch.testing.assert_close(model.decode(early, [3]), model.decode(late, [3]))


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 100])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "num_self_decoder_layers": 3}])
def test_tensors_take_what_the_formula_and_the_accounting_say(count, changes):
    shape = dataclasses.replace(SHAPE, **changes)
    model = YocoModel(shape)
    sequence = model.start()
    model.prefill(sequence, tokens(count))
    for held in (count, count + 1):
        whole = 2 * held * shape.num_key_value_heads * 16 * 4
        windows = shape.num_self_decoder_layers * 2 * min(held, WINDOW) * 4 * 16 * 4
        assert sequence.nbytes == whole + windows
        cache = read_model_cache(stated(shape))
        assert sequence.nbytes == cache.bytes_at(held, element_bytes=4)
        model.decode(sequence, [3])


def test_the_model_is_what_its_config_is_detected_as():
    method = YouOnlyCacheOnce()
    config = stated(SHAPE)
    assert method.detect(config)
    # Beyond the windows: 2 x 2 heads x 16 numbers of 4 bytes.
    assert method.bytes_per_token(config, tokens=WINDOW, element_bytes=4) == 256


def test_the_same_seed_gives_the_same_model():
    one, two, other = (YocoModel(SHAPE, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_self_heads": 5}, "do not divide"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_cross_decoder_layers": 0}, "both kinds"),
    ],
)
def test_shapes_that_make_no_model_are_refused(changes, reason):
    with pytest.raises(BadInput, match=reason):
        YocoModel(dataclasses.replace(SHAPE, **changes))


def test_an_empty_prompt_is_refused():
    model = YocoModel(SHAPE)
    with pytest.raises(BadInput, match="empty"):
        model.prefill(model.start(), [])
