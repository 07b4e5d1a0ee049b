"""Which surfaces are recorded: the server, the load, the levers with their values, and the order.

Sizes are for one core of a CPU without AVX-512, so that a measurement takes less than half a
minute, the start of its server included: those of the first `LAYERS` layers of SmolLM2-135M, or of
a model whose keys and values are most of it. What such models say has no sense; what they take has,
and no answer is kept.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from pydantic import JsonValue
from verdict_models import cut_model, make_model

from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.types import Bottleneck, Request

MIB = 1 << 20
LAYERS = 4

Point = tuple[JsonValue, ...]
"""One value for each axis of a surface, in their order."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An engine argument, the values that are measured, and the one the engine has by itself."""

    argument: str
    values: tuple[JsonValue, ...]
    stock: JsonValue

    @property
    def knob(self) -> str:
        """The name of the lever in a search."""
        return self.argument.replace("-", "_")


@dataclass(frozen=True, slots=True)
class SurfaceSpec:
    """A grid of configurations and the load that each is measured under.

    `bound_by` is what a verdict on the stock configuration may name: a surface that is bound by
    something else is not the one that was meant. `goal` decides which points are measured again.
    `shape` names a made model (`verdict_models.SHAPES`); without it, a part of the real one serves.
    """

    name: str
    built: str
    bound_by: tuple[Bottleneck, ...]
    goal: str
    base_arguments: Mapping[str, JsonValue]
    axes: tuple[Axis, ...]
    load: SyntheticSpec
    concurrency: int
    warmup_requests: int
    shape: str | None = None
    seed: int = 1

    @property
    def stock(self) -> Point:
        """The point that sets nothing."""
        return tuple(axis.stock for axis in self.axes)

    def points(self) -> list[Point]:
        """All points, in the order of the axes."""
        return list(product(*(axis.values for axis in self.axes)))

    def arguments(self, point: Point) -> dict[str, JsonValue]:
        """The engine arguments of a point; a stock value is not named."""
        return {**self.base_arguments, **changed(self.axes, point)}

    def order(self) -> list[Point]:
        """The points beside stock in the order in which they are measured, the same every time."""
        points = [point for point in self.points() if point != self.stock]
        random.Random(f"{self.name} {self.seed}").shuffle(points)
        return points

    def requests(self) -> tuple[Request, ...]:
        """The requests of every measurement; their tokens are drawn anew each time."""
        return tuple(make_requests(self.load, self.seed))


def served_model(spec: SurfaceSpec, model: Path, folder: Path) -> Path:
    """Write the model that a surface is of, with the tokenizer of the real one, into a folder."""
    if spec.shape is None:
        return cut_model(model, LAYERS, folder)
    return make_model(spec.shape, model, folder)


def changed(axes: Sequence[Axis], point: Point) -> dict[str, JsonValue]:
    """The arguments of a point that are not stock."""
    return {
        axis.argument: value for axis, value in zip(axes, point, strict=True) if value != axis.stock
    }


def surfaces() -> dict[str, SurfaceSpec]:
    """The surfaces that can be recorded, by name."""
    return {spec.name: spec for spec in (_capacity(), _bandwidth())}


def _base(**more: JsonValue) -> dict[str, JsonValue]:
    """What every server has. Levers that the grid has not are fixed at what the engine does."""
    return {
        "dtype": "float32",
        "enforce-eager": True,
        "enable-prefix-caching": True,
        "prefix-caching-hash-algo": "sha256",
        "watermark": 0.0,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def _capacity() -> SurfaceSpec:
    return SurfaceSpec(
        name="capacity",
        built="20 at a time over two prefixes of 608 tokens, in a pool of 2,218 tokens",
        bound_by=(Bottleneck.KV_CAPACITY,),
        goal="max goodput where p95 ttft <= 3s and p95 itl <= 250ms",
        base_arguments=_base(
            kv_cache_memory_bytes=13 * MIB, max_model_len=2048, long_prefill_token_threshold=0
        ),
        axes=(
            # Eight blocks of 256 tokens hold no longest request: those servers do not start.
            Axis("block-size", (32, 64, 128, 256), 128),
            Axis("max-num-seqs", (3, 4, 6, 8, 12, 16, 128), 128),
            Axis("max-num-batched-tokens", (512, 1024, 2048), 2048),
            Axis("scheduler-reserve-full-isl", (True, False), True),
        ),
        load=SyntheticSpec(
            requests=48,
            input_tokens="uniform:16-32",
            output_tokens="uniform:16-32",
            shared_prefixes=2,
            prefix_tokens=608,
        ),
        concurrency=20,
        warmup_requests=4,
    )


def _bandwidth() -> SurfaceSpec:
    return SurfaceSpec(
        name="bandwidth",
        built="24 at a time over a context of 2,048 tokens with 32 KV heads, all of which fit",
        bound_by=(Bottleneck.KV_BANDWIDTH,),
        goal="max goodput where p95 itl <= 70ms",
        base_arguments=_base(
            kv_cache_memory_bytes=256 * MIB, max_model_len=4096, scheduler_reserve_full_isl=True
        ),
        axes=(
            Axis("block-size", (32, 64, 128), 128),
            Axis("max-num-seqs", (4, 6, 8, 10, 12, 16, 128), 128),
            Axis("max-num-batched-tokens", (512, 1024, 2048, 4096), 2048),
            Axis("long-prefill-token-threshold", (0, 256), 0),
        ),
        load=SyntheticSpec(
            requests=56,
            input_tokens="8",
            output_tokens="uniform:16-28",
            shared_prefixes=1,
            prefix_tokens=2048,
        ),
        concurrency=24,
        warmup_requests=2,
        shape="keys",
    )
