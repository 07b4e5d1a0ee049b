"""What each stack of methods would take and allow on a device, by formula alone.

The roof is what the memory bus allows: a decode step of a batch reads the weights once and each
sequence's cache; nothing can be faster, and much can be slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.compose import notes, refusals
from kvtune.policies.devices import DeviceSpec
from kvtune.policies.footprint import Footprint, footprint
from kvtune.policies.method import (
    ArchitectureMethod,
    History,
    LayerShape,
    Method,
    SelectionMethod,
    StoreMethod,
    TokenMethod,
    methods,
)
from kvtune.policies.method_stack import MethodStack
from kvtune.policies.model_cache import ModelCache
from kvtune.policies.model_layers import Kind, Rows
from kvtune.types import Harm

ELEMENT_BYTES = 2
"""Bytes of a full-precision number, as served with `--dtype auto`."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A model on a device, and the sequences that it serves.

    `seen` is a sequence at its end: prompt and generated tokens. `weight_bytes` are those on each
    device. `reserve_bytes` are what activations, graphs and the engine take besides.
    """

    cache: ModelCache
    device: DeviceSpec
    seen: History
    weight_bytes: int
    memory_share: float
    reserve_bytes: int = 0
    tensor_parallel: int = 1

    @property
    def kv_bytes(self) -> int:
        """Memory left for KV caches on each device.

        Raises:
            BadInput: the weights leave none.
        """
        left = int(self.device.memory_bytes * self.memory_share) - self.weight_bytes
        left -= self.reserve_bytes
        if left <= 0:
            raise BadInput(
                f"the weights ({self.weight_bytes / 2**30:.1f} GiB on each device) leave no memory "
                f"for a cache in {self.memory_share:.0%} of {self.device.name}",
                fix="use more devices (--tensor-parallel), or a larger one",
            )
        return left


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stack on one device. `refused` says why it cannot run; then there are no figures.

    Bytes are those of one sequence at its end, on one device. `sequences` of these fit at once,
    `tokens` in all. `step_bytes` is what a decode step of that many sequences reads, weights
    included, `step_roof_s` the least time for it, and `tokens_per_s_roof` what that allows.
    """

    stack: str
    harm: Harm
    refused: str = ""
    notes: tuple[str, ...] = ()
    bytes_per_token: float | None = None
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    read_bytes_per_step: int | None = None
    sequences: int | None = None
    tokens: int | None = None
    step_bytes: int | None = None
    step_roof_s: float | None = None
    tokens_per_s_roof: float | None = None


def plan(given: PlanInput, stacks: Sequence[MethodStack]) -> list[PlanRow]:
    """Return one row a stack, in the order given.

    Raises:
        BadInput: the model does not fit at all.
    """
    budget = given.kv_bytes
    return [_row(given, stack, budget) for stack in stacks]


def default_stacks() -> list[MethodStack]:
    """The full cache, and every method that works inside a cache, at its defaults."""
    kinds = (StoreMethod, TokenMethod, SelectionMethod)
    alone = [
        MethodStack((cls(),)) for _, cls in sorted(methods().items()) if issubclass(cls, kinds)
    ]
    return [MethodStack(), *alone]


def architecture_advice(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What the architectures that a config.json describes mean, by their titles."""
    kinds = [cls() for _, cls in sorted(methods().items()) if issubclass(cls, ArchitectureMethod)]
    return {kind.title: tuple(kind.advise(config)) for kind in kinds if kind.detect(config)}


def method_layers(cache: ModelCache, tensor_parallel: int = 1) -> list[LayerShape]:
    """The layers that methods work on, as each rank sees them: those with full attention.

    Raises:
        BadInput: the heads do not divide over the ranks.
    """
    return [
        _shape(cache, index, held, tensor_parallel)
        for index, held in _rows(cache)
        if held.kind is Kind.FULL
    ]


def worst_harm(parts: Sequence[Method]) -> Harm:
    """The worst harm class among methods."""
    order = list(Harm)
    return max((method.harm for method in parts), key=order.index, default=Harm.LOSSLESS)


def row_as_dict(row: PlanRow) -> Mapping[str, Any]:
    """A row for JSON."""
    return {name: getattr(row, name) for name in PlanRow.__dataclass_fields__}


def _row(given: PlanInput, stack: MethodStack, budget: int) -> PlanRow:
    harm = worst_harm(stack.methods)
    reasons = refusals(stack)
    if reasons:
        return PlanRow(str(stack), harm, refused="; ".join(reasons))
    try:
        taken = stack_bytes(given.cache, stack, given.seen, given.tensor_parallel)
    except BadInput as error:
        return PlanRow(str(stack), harm, refused=error.message)
    sequences = budget // max(taken.resident_bytes, 1)
    read = taken.read_bytes_per_step
    step = given.weight_bytes + sequences * read
    roof_s = step / given.device.bandwidth_bytes_per_s
    return PlanRow(
        stack=str(stack),
        harm=harm,
        notes=notes(stack),
        bytes_per_token=taken.resident_bytes / given.seen.tokens,
        resident_bytes=taken.resident_bytes,
        peak_bytes=taken.peak_bytes,
        read_bytes_per_step=read,
        sequences=sequences,
        tokens=budget * given.seen.tokens // max(taken.resident_bytes, 1),
        step_bytes=step,
        step_roof_s=roof_s,
        tokens_per_s_roof=sequences / roof_s,
    )


def stack_bytes(
    cache: ModelCache, stack: MethodStack, seen: History, tensor_parallel: int = 1
) -> Footprint:
    """Bytes of one sequence of a model under a stack, on one device.

    Layers without full attention (windows, states, latents) keep what they keep: methods leave
    them alone. A layer that reads the full cache of another one reads what the method left there.

    Raises:
        BadInput: the model has no layer that the methods could work on, or a method refuses its
            shape.
    """
    shapes = method_layers(cache, tensor_parallel)
    if stack.methods and not shapes:
        kinds = sorted({kind.value for layer in cache.layer_kinds for kind in layer})
        raise BadInput(
            f"{cache.architecture} has no full-attention layer for it (its layers keep: "
            f"{', '.join(kinds)})",
            fix="plan the full cache",
        )
    readers = [
        _shape(cache, index, held, tensor_parallel)
        for index, held in _rows(cache)
        if _reads_full(held)
    ]
    rest = [
        held
        for layer in cache.layers
        for held in layer
        if not (isinstance(held, Rows) and (held.kind is Kind.FULL or _reads_full(held)))
    ]
    tokens = seen.tokens
    fixed = sum(held.resident_bytes(tokens, ELEMENT_BYTES, tensor_parallel) for held in rest)
    read = sum(held.read_bytes(tokens, ELEMENT_BYTES, tensor_parallel) for held in rest)
    own = footprint(stack, shapes, seen.at_once, seen.appended, every_step=False)
    read += footprint(
        stack, readers, seen.at_once, seen.appended, every_step=False
    ).read_bytes_per_step
    return Footprint(
        resident_bytes=own.resident_bytes + fixed,
        read_bytes_per_step=own.read_bytes_per_step + read,
        peak_bytes=own.peak_bytes + fixed,
        remote_bytes=own.remote_bytes,
        constant_bytes=own.constant_bytes,
    )


def _rows(cache: ModelCache) -> Iterator[tuple[int, Rows]]:
    for index, layer in enumerate(cache.layers):
        for held in layer:
            if isinstance(held, Rows):
                yield index, held


def _reads_full(held: Rows) -> bool:
    """Whether a layer reads the full-attention cache of another one."""
    alone = held.tokens_per_row == 1 and held.span_tokens is None and held.value_dim > 0
    return held.kind is Kind.SHARED and alone


def _shape(cache: ModelCache, index: int, held: Rows, ranks: int) -> LayerShape:
    heads = 1 if ranks % held.heads == 0 else held.heads // ranks
    if ranks % held.heads and held.heads % ranks:
        raise BadInput(
            f"{held.heads} KV heads do not divide over {ranks} ranks",
            fix="choose a tensor-parallel size that divides them",
        )
    queries = max((cache.query_heads or held.heads) // ranks, heads)
    return LayerShape(
        index=index,
        layers=len(cache.layers),
        query_heads=queries,
        kv_heads=heads,
        key_dim=held.key_dim,
        value_dim=held.value_dim,
        element_bytes=held.number_bytes or ELEMENT_BYTES,
    )
