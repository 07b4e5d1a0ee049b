"""Which surfaces are recorded: the server, the load, the levers with their values, and the order.

Sizes are for SmolLM2-135M on two CPU cores, so that a measurement takes about 20 seconds (capacity)
or 30 (bandwidth), the start of its server included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pydantic import JsonValue

from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.types import Bottleneck, Request

MIB = 1 << 20

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
        "enforce-eager": True,
        "enable-prefix-caching": True,
        "prefix-caching-hash-algo": "sha256",
        "scheduler-reserve-full-isl": True,
        "watermark": 0.0,
        "long-prefill-token-threshold": 0,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def _capacity() -> SurfaceSpec:
    return SurfaceSpec(
        name="capacity",
        built="20 at a time over two prefixes of 608 tokens, in a pool of 2,184 tokens",
        bound_by=(Bottleneck.KV_CAPACITY,),
        goal="max goodput where p95 ttft <= 3s and p95 itl <= 250ms",
        base_arguments=_base(kv_cache_memory_bytes=48 * MIB, max_model_len=2048),
        axes=(
            # Seven blocks of 256 tokens hold no longest request: those servers do not start.
            Axis("block-size", (32, 64, 128, 256), 128),
            Axis("max-num-seqs", (3, 4, 6, 8, 12, 16, 128), 128),
            Axis("max-num-batched-tokens", (512, 1024, 2048), 2048),
            Axis("kv-cache-dtype", ("auto", "fp8"), "auto"),
        ),
        load=SyntheticSpec(
            requests=64,
            input_tokens="uniform:16-32",
            output_tokens="uniform:32-48",
            shared_prefixes=2,
            prefix_tokens=608,
        ),
        concurrency=20,
        warmup_requests=4,
    )


def _bandwidth() -> SurfaceSpec:
    return SurfaceSpec(
        name="bandwidth",
        built="16 at a time over two contexts of 3,584 tokens, all of which fit",
        bound_by=(Bottleneck.KV_BANDWIDTH,),
        goal="max goodput where p95 itl <= 160ms",
        base_arguments=_base(kv_cache_memory_bytes=330 * MIB, max_model_len=4096),
        axes=(
            Axis("block-size", (32, 64, 128), 128),
            Axis("max-num-seqs", (2, 3, 4, 6, 8, 12, 128), 128),
            Axis("max-num-batched-tokens", (512, 1024, 2048, 4096), 2048),
            Axis("kv-cache-dtype", ("auto", "fp8"), "auto"),
        ),
        load=SyntheticSpec(
            requests=48,
            input_tokens="32",
            output_tokens="uniform:24-48",
            shared_prefixes=2,
            prefix_tokens=3584,
        ),
        concurrency=16,
        warmup_requests=2,
    )
