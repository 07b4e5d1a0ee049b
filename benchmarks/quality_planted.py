"""Faults that `quality_faults.py` plants: KV formats of a server, and methods that are wrong."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import JsonValue
from torch import Tensor

from kvtune.policies.eviction import Evictor, EvictorContext, Seen, Span
from kvtune.policies.method import (
    Axis,
    History,
    LayerShape,
    Paper,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    Role,
    StoreMethod,
    TokenMethod,
)
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.plane import Plane, PlaneContext, TokenCodec, TokenPlane, full_plane
from kvtune.types import Harm

MORE_ITEMS = 24
"""Of a category that the baseline itself gets right only now and then: six show no fault."""

PLANTED = Paper("planted by a benchmark of kvtune", "none", 2026)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the suites that should notice it (none: nobody knows, or nothing is wrong).

    `arguments` are what a server is started with, `stack` is what the reference engine runs.
    `proves`: enough is asked for a right candidate to pass. `numbers` are items of a category for
    suites that need more than others here, and `categories` all that a suite is asked of.
    """

    name: str
    says: str
    expected: tuple[str, ...] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    stack: MethodStack | None = None
    proves: bool = False
    numbers: Mapping[str, int] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def engine(self) -> Literal["vllm", "reference"]:
        """Who is asked."""
        return "vllm" if self.stack is None else "reference"

    @property
    def where(self) -> Literal["vllm", "reference", "proving"]:
        """The part of the benchmark that asks."""
        return "proving" if self.proves else self.engine


FP8: Mapping[str, JsonValue] = {"kv-cache-dtype": "fp8"}


class WrongScale(StoreMethod):
    """Reads `factor` times what was stored, in one layer or all: 1 is right, 0 loses all."""

    name = "planted-scale"
    title = "planted: wrong scale"
    axis = Axis.BITS
    harm = Harm.LOSSY
    saves = ()
    acts = "both"
    paper = PLANTED
    summary = "Reads a multiple of what was stored."

    factor: float = 1.0
    layer: int | None = None
    roles: tuple[Role, ...] = ("key", "value")

    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """A plane that reads wrong, or a right one where this is not planted."""
        here = ctx.shape.role in self.roles and self.layer in (None, ctx.shape.layer)
        return TokenPlane(_Scaled(self.factor)) if here else full_plane(ctx)

    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Full precision."""
        return shape.full_bytes(held.tokens)


class _Scaled(TokenCodec):
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def decode(self, held: Mapping[str, Tensor]) -> Tensor:
        return held["x"] * self._factor


class _PlantedEviction(TokenMethod):
    """Drops the same tokens in all heads, protected or not, and scores nothing."""

    axis = Axis.TOKEN
    harm = Harm.LOSSY
    saves = ()
    paper = PLANTED

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """All heads keep the same tokens."""
        return "uniform"

    def history(self, seen: History, layer: LayerShape) -> History:
        """Nobody counts bytes here: at most all."""
        return seen

    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """No scores: 0."""
        return 0


class LostSystemPrompt(_PlantedEviction):
    """Drops the tokens of system messages when the prompt is complete."""

    name = "planted-lost-system-prompt"
    title = "planted: lost system prompt"
    acts = "prefill"
    summary = "Drops the system prompt."

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build the choice, which holds nothing."""
        return _NotSystem()


class LostMiddle(_PlantedEviction):
    """Keeps the first `sink_tokens` and the latest `window_tokens`."""

    name = "planted-lost-middle"
    title = "planted: lost middle"
    acts = "both"
    summary = "Drops the middle."

    sink_tokens: int = 4
    window_tokens: int = 124

    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build the choice, which holds nothing."""
        return _Ends(self.sink_tokens, self.window_tokens)


class _Planted(Evictor):
    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        """Nothing: only places count."""

    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        kept = self.kept(seen.key_positions[0], seen.ctx.spans)
        return None if kept.all() else kept.nonzero().T

    @abstractmethod
    def kept(self, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """Which tokens at `positions` [n], ascending, stay: bool [n]."""


class _NotSystem(_Planted):
    def kept(self, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        stay = torch.ones_like(positions, dtype=torch.bool)
        for span in spans:
            if span.label == "system":
                stay &= (positions < span.start) | (positions >= span.end)
        return stay


class _Ends(_Planted):
    def __init__(self, sink_tokens: int, window_tokens: int) -> None:
        self._sink_tokens = sink_tokens
        self._window_tokens = window_tokens

    def kept(self, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        stay = positions < self._sink_tokens
        stay[-self._window_tokens :] = True
        return stay


def faults(layers: int) -> tuple[Fault, ...]:
    """All faults, those of a model with `layers` layers; the first of each engine plants nothing.

    Which suite should notice was written down before anything was measured.
    """
    long_prompts = ("fidelity", "needle")
    formats = (
        "int8_per_token_head",
        "int4_per_token_head",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
    )
    middle = layers // 2
    window = LostMiddle()
    return (
        Fault("vllm-right", "nothing: other batches", arguments={"max-num-seqs": 8}),
        Fault("fp8", "one byte a number, scale 1", arguments=FP8),
        *(
            Fault(
                name,
                "a format that the CPU backend takes and cannot do",
                long_prompts,
                {"kv-cache-dtype": name},
            )
            for name in formats
        ),
        Fault("reference-right", "nothing: stored and read as it is", stack=_one(WrongScale())),
        Fault(
            "scale-4x",
            "all keys and values read back four times too large",
            long_prompts,
            stack=_one(WrongScale(factor=4)),
        ),
        Fault(
            "one-layer-v-zero",
            f"the values of layer {middle} of {layers} read back as 0",
            ("fidelity",),
            stack=_one(WrongScale(factor=0, layer=middle, roles=("value",))),
        ),
        Fault(
            "forgets-the-middle",
            f"{window.sink_tokens} sinks and the latest {window.window_tokens} tokens stay",
            ("needle", "multi-turn"),
            stack=_one(window),
        ),
        Fault(
            "drops-the-system-prompt",
            "an eviction that drops the tokens of system messages; "
            f"{MORE_ITEMS} items of a category of leakage, tools and instructions/system",
            ("instructions", "leakage", "tools"),
            stack=_one(LostSystemPrompt()),
            numbers=dict.fromkeys(("instructions", "leakage", "tools"), MORE_ITEMS),
            categories={"instructions": ("system",)},
        ),
        Fault(
            "fp8, to prove",
            "fp8 again, asked as many items as the suites' own limits need",
            arguments=FP8,
            proves=True,
        ),
    )


def _one(method: StoreMethod | TokenMethod) -> MethodStack:
    return MethodStack((method,))
