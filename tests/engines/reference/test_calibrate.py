"""Samples for calibrated methods: what the projections gave, and the gradients of the loss."""

import pytest
import torch
from contracts.tiny_models import tiny_engine, tiny_model, tokens
from torch.nn.functional import cross_entropy

from kvtune.engines.reference.calibrate import calibrate, layer_samples
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.errors import BadInput
from kvtune.policies.methods.ojakv import OjaKV

TEXTS = (tokens(23), tokens(9, 1))
PROJECTIONS = {"key": "k_proj", "value": "v_proj"}


def flat(vectors):
    """[heads, n, d] as a projection gives it: [n, heads * d]."""
    return vectors.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config"])
def test_keys_before_the_rotation_and_values_are_what_the_projections_make_of_the_inputs(family):
    engine = tiny_engine(family)
    found = list(layer_samples(engine, TEXTS, gradients=False))
    assert [(x.shape.index, x.role) for x in found] == [
        (layer, role) for layer in range(4) for role in ("key", "value")
    ]
    for samples in found:
        assert samples.gradients is None
        assert (samples.bias is None) == (family == "LlamaConfig")
        expected = torch.nn.functional.linear(samples.inputs, samples.weight, samples.bias)
        assert len(expected) == 23 + 9
        torch.testing.assert_close(flat(samples.vectors), expected, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_the_loss():
    """Over tokens, gradient times input is the weight's gradient, which autograd gives too."""
    engine = ReferenceEngine(tiny_model())
    samples = {(x.shape.index, x.role): x for x in layer_samples(engine, TEXTS, gradients=True)}
    weights = {
        (layer, role): getattr(engine.model.model.layers[layer].self_attn, name).weight
        for layer in (0, 2)
        for role, name in PROJECTIONS.items()
    }
    for weight in weights.values():
        weight.requires_grad_(True)
    with engine.plain() as model:
        for text in TEXTS:
            ids = torch.tensor([text])
            logits = model(input_ids=ids, use_cache=False).logits[0]
            cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").backward()
    for place, weight in weights.items():
        own = samples[place]
        found = flat(own.gradients).mT @ own.inputs
        scale = weight.grad.abs().max()
        assert scale > 1e-3
        torch.testing.assert_close(found / scale, weight.grad / scale, atol=1e-4, rtol=1e-3)


def test_a_calibration_is_bound_to_its_weights_and_the_engine_runs_on():
    engine = ReferenceEngine(tiny_model())
    before = engine.prefill([engine.start()], [TEXTS[0]])[0]
    found = calibrate(engine, OjaKV(), TEXTS)
    assert found.model_hash == engine.model_hash
    assert set(found.learned) == {(n, role) for n in range(4) for role in PROJECTIONS}
    assert torch.equal(engine.prefill([engine.start()], [TEXTS[0]])[0], before)
    engine.use_calibration(OjaKV(), found)
    other = ReferenceEngine(tiny_model(rms_norm_eps=1e-6))
    other.model.model.layers[0].mlp.down_proj.weight.data *= 2
    with pytest.raises(BadInput, match="other weights"):
        other.use_calibration(OjaKV(), found)


@pytest.mark.parametrize("texts", [[], [[1]], [[1, 2], []]])
def test_texts_that_predict_nothing_are_refused(texts):
    with pytest.raises(BadInput, match="at least two tokens"):
        calibrate(tiny_engine(), OjaKV(), texts)
