"""Let a calibrated method learn from a model and sample text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from kvtune.engines.reference.attention import attend
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.families import LayerFacts
from kvtune.engines.reference.step import ATTENTION
from kvtune.errors import BadInput
from kvtune.policies.calibration import CalibratedMethod, Calibration, LayerSamples, Learned
from kvtune.policies.footprint import ROLES
from kvtune.policies.method import Role

WATCHING = "kvtune_watching"
PROJECTIONS: dict[Role, str] = {"key": "k_proj", "value": "v_proj"}


@dataclass(slots=True)
class Watched:
    """What one pass left behind, by layer: keys and values [Hk, n, d] as attention used them."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)


def calibrate(
    engine: ReferenceEngine, method: CalibratedMethod, texts: Sequence[Sequence[int]]
) -> Calibration:
    """Run sample texts (token ids, at least two each) and let `method` learn from every layer.

    Memory grows with layers x tokens x hidden size. The result is bound to the engine's weights;
    pass it to `engine.use_calibration`, or save it.

    Raises:
        BadInput: no text, or a text too short to predict anything.
    """
    if not texts or any(len(text) < 2 for text in texts):
        raise BadInput("calibration needs texts of at least two tokens", fix="give longer texts")
    learned: dict[tuple[int, Role], Learned] = {
        (samples.shape.index, samples.role): method.calibrate(samples)
        for samples in layer_samples(engine, texts, gradients=method.needs_gradients)
    }
    return Calibration(method.name, method.calibration_key, engine.model_hash, learned)


def layer_samples(
    engine: ReferenceEngine, texts: Sequence[Sequence[int]], *, gradients: bool
) -> Iterator[LayerSamples]:
    """Yield what every layer did with the texts: keys, then values, layer by layer."""
    with _watching(engine):
        passes = [_run(engine, text, gradients) for text in texts]
    for facts in engine.facts:
        for role in ROLES:
            yield _samples(engine, facts, role, passes, gradients)


@contextmanager
def _watching(engine: ReferenceEngine) -> Iterator[None]:
    engine.model.set_attn_implementation(WATCHING)
    try:
        yield
    finally:
        engine.model.set_attn_implementation(ATTENTION)


def _run(engine: ReferenceEngine, text: Sequence[int], gradients: bool) -> Watched:
    watched = Watched()
    ids = torch.tensor([list(text)], device=engine.device)
    embeddings = engine.model.get_input_embeddings()(ids).detach().requires_grad_(gradients)
    handles = [
        block.self_attn.k_proj.register_forward_pre_hook(_keep_input(watched, index))
        for index, block in enumerate(engine.model.model.layers)
    ]
    try:
        with torch.set_grad_enabled(gradients):
            logits = engine.model(
                inputs_embeds=embeddings, use_cache=False, kvtune_watched=watched
            ).logits[0]
            if gradients:
                # The sum, not the mean: each token's gradient keeps its size in longer texts.
                loss = cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum")
                torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    return watched


def _keep_input(watched: Watched, index: int) -> Any:
    def hook(module: Any, args: tuple[Tensor, ...]) -> None:
        watched.inputs[index] = args[0].detach()[0]

    return hook


def _samples(
    engine: ReferenceEngine,
    facts: LayerFacts,
    role: Role,
    passes: Sequence[Watched],
    gradients: bool,
) -> LayerSamples:
    index = facts.shape.index
    found = [watched.keys[index] if role == "key" else watched.values[index] for watched in passes]
    projection = getattr(engine.model.model.layers[index].self_attn, PROJECTIONS[role])
    return LayerSamples(
        shape=facts.shape,
        role=role,
        vectors=torch.cat([_before_rope(x.detach(), facts, role) for x in found], dim=1),
        inputs=torch.cat([watched.inputs[index] for watched in passes]),
        weight=projection.weight.detach(),
        bias=None if projection.bias is None else projection.bias.detach(),
        gradients=torch.cat([_before_rope(_gradient(x), facts, role) for x in found], dim=1)
        if gradients
        else None,
    )


def _before_rope(x: Tensor, facts: LayerFacts, role: Role) -> Tensor:
    """Take the rotation off keys. It is orthogonal, so gradients go back the same way."""
    if role == "value":
        return x
    return facts.rope.unrotate(x, torch.arange(x.shape[1], device=x.device))


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _watch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvtune_watched: Watched,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend one text, and leave its keys and values (with gradients, if wanted) to be read."""
    keys, values = key[0], value[0]
    if keys.requires_grad:
        keys.retain_grad()
        values.retain_grad()
    kvtune_watched.keys[module.layer_idx] = keys
    kvtune_watched.values[module.layer_idx] = values
    positions = torch.arange(keys.shape[1], device=keys.device)
    out = attend(
        query[0],
        keys,
        values,
        positions,
        positions[None],
        scale=scaling,
        softcap=softcap,
        window_tokens=sliding_window,
    )
    return out.transpose(0, 1)[None], None


AttentionInterface.register(WATCHING, _watch)
