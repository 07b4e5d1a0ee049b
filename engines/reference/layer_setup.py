"""What the cache of one layer of one sequence is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtune.engines.reference.families import LayerFacts
from kvtune.engines.reference.rope import Rope
from kvtune.errors import BadInput
from kvtune.policies.calibration import CalibratedMethod
from kvtune.policies.eviction import Span
from kvtune.policies.method import LayerShape, Role
from kvtune.policies.method_stack import MethodStack

if TYPE_CHECKING:
    from kvtune.engines.reference.engine import ReferenceEngine

Learned = Mapping[Role, Mapping[str, Mapping[str, Tensor]]]
"""Tensors of calibrated methods for one layer, by role, method name and their own name."""


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """A layer, its stack of methods, and what they share.

    `leads` says that another layer must keep the tokens that this one keeps. `sequence` and
    `engine` are the dictionaries that methods share within one sequence and across all.
    """

    shape: LayerShape
    stack: MethodStack
    rope: Rope
    scale: float
    softcap: float | None
    window_tokens: int | None
    dtype: torch.dtype
    device: torch.device
    spans: tuple[Span, ...] = ()
    exact_prefill: bool = True
    leads: bool = False
    calibration: Learned = field(default_factory=dict)
    sequence: dict[Any, Any] = field(default_factory=dict)
    engine: dict[Any, Any] = field(default_factory=dict)


def layer_setup(
    engine: ReferenceEngine,
    facts: LayerFacts,
    stack: MethodStack,
    spans: tuple[Span, ...],
    exact_prefill: bool,
    shared: dict[Any, Any],
) -> LayerSetup:
    """Put together one layer of a sequence; `shared` is for all of its layers.

    Raises:
        BadInput: a method needs a calibration that the engine does not have.
    """
    # A layer that was trained with a window drops tokens by itself: methods leave it alone.
    own = stack if facts.window_tokens is None else MethodStack()
    return LayerSetup(
        shape=facts.shape,
        stack=own,
        rope=facts.rope,
        scale=facts.scale,
        softcap=facts.softcap,
        window_tokens=facts.window_tokens,
        dtype=engine.dtype,
        device=engine.device,
        spans=spans,
        exact_prefill=exact_prefill,
        leads=any(
            own.leader(other.shape) == facts.shape.index
            for other in engine.facts
            if other.window_tokens is None
        ),
        calibration=_learned(engine, own, facts.shape.index),
        sequence=shared,
        engine=engine.shared,
    )


def _learned(engine: ReferenceEngine, stack: MethodStack, layer: int) -> Learned:
    roles: dict[Role, dict[str, Mapping[str, Tensor]]] = {"key": {}, "value": {}}
    for method in stack.methods:
        if not isinstance(method, CalibratedMethod):
            continue
        known = engine.calibrations.get(method.calibration_key)
        if known is None:
            raise BadInput(
                f"{method} needs a calibration of this model",
                fix="make one (kvtune.engines.reference.calibrate) and pass it to use_calibration",
            )
        for role, learned in roles.items():
            learned[method.name] = known.learned[layer, role]
    return dict(roles)
