"""Methods put together: at most one that evicts in each phase, one that selects, a chain of stores.

The chain runs from the outside in: merge layers, project, place in pages, quantize. What ends it is
full precision. Which methods go together is a table in `policies/compose.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtune.errors import BadInput
from kvtune.policies.method import (
    Axis,
    History,
    LayerShape,
    Method,
    PlaneBytes,
    PlaneFactory,
    PlaneShape,
    SelectedBytes,
    SelectionMethod,
    StoreMethod,
    TokenMethod,
    methods,
)
from kvtune.policies.plane import Plane, PlaneContext, full_plane

CHAIN = (Axis.LAYER, Axis.DIM, Axis.PLACEMENT, Axis.BITS)
"""The order of stores, from the outside in."""


@dataclass(frozen=True, slots=True)
class MethodStack:
    """Methods that work on one cache together. The empty stack is the full cache."""

    methods: tuple[Method, ...] = ()

    @property
    def evictors(self) -> tuple[TokenMethod, ...]:
        """The methods that drop tokens: those at the prompt's end first."""
        found = [method for method in self.methods if isinstance(method, TokenMethod)]
        return tuple(sorted(found, key=lambda method: method.acts == "decode"))

    @property
    def selection(self) -> SelectionMethod | None:
        """The method that reads only some tokens."""
        found = (method for method in self.methods if isinstance(method, SelectionMethod))
        return next(found, None)

    @property
    def stores(self) -> tuple[StoreMethod, ...]:
        """The chain of stores, from the outside in."""
        found = [method for method in self.methods if isinstance(method, StoreMethod)]
        return tuple(sorted(found, key=lambda method: CHAIN.index(method.axis)))

    @property
    def pre_rope(self) -> bool:
        """Whether keys are stored before RoPE."""
        return any(store.key_space == "pre-rope" for store in self.stores) or self.compact

    @property
    def compact(self) -> bool:
        """Whether survivors of an eviction are rotated to positions 0..n-1."""
        return any(evictor.position_mode == "compact" for evictor in self.evictors)

    @property
    def tracks_positions(self) -> bool:
        """Whether the cache must hold the position of each token: where some may be missing."""
        return bool(self.evictors) or self.leaves_gaps

    @property
    def leaves_gaps(self) -> bool:
        """Whether positions may be missing even if nothing is dropped."""
        return any(method.leaves_gaps for method in self.methods)

    def plane(self, ctx: PlaneContext) -> Plane:
        """Build the empty store of one sequence's keys or values in one layer."""
        factory: PlaneFactory = full_plane
        for store in reversed(self.stores):
            factory = _build(store, factory)
        return factory(ctx)

    def plane_bytes(
        self, shape: PlaneShape, held: History, observed: Mapping[str, int] | None = None
    ) -> int:
        """Bytes of that store when it holds `held`."""
        return _chain(self.stores, observed)(shape, held)

    def borrowed_bytes(
        self, shape: PlaneShape, held: History, observed: Mapping[str, int] | None = None
    ) -> int:
        """Bytes of other layers' stores that reading that store touches."""
        if not self.stores:
            return 0
        outermost, *within = self.stores
        return outermost.borrowed_bytes(shape, held, _chain(within, observed), observed)

    def passing_bytes(self, shape: PlaneShape, held: History, own_bytes: int) -> int:
        """Bytes above `own_bytes` of that store that storing a prompt takes for a moment."""
        return self.stores[0].passing_bytes(shape, held, own_bytes) if self.stores else 0

    def leader(self, layer: LayerShape) -> int | None:
        """The layer whose choice of tokens `layer` must follow; None: it is free."""
        found = (store.leader(layer.index, layer.layers) for store in self.stores)
        return next((leader for leader in found if leader is not None), None)

    def selected_bytes(
        self,
        shape: PlaneShape,
        held: History,
        tokens: int,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes read to fetch `tokens` of the `held` tokens of each head of that store."""
        formula: SelectedBytes = _full_selected
        for store in reversed(self.stores):
            formula = _selected(store, formula)
        some = formula(shape, held, tokens)
        if some is not None:
            return some
        own = self.plane_bytes(shape, held, observed)
        return own + self.borrowed_bytes(shape, held, observed)

    def held(self, seen: History, layer: LayerShape) -> History:
        """What a layer holds for each KV head after `seen` (prompt, decoded) tokens."""
        for evictor in self.evictors:
            seen = evictor.history(seen, layer)
        return seen

    def __str__(self) -> str:
        return " + ".join(str(method) for method in self.methods) or "full"


def parse_stack(text: str) -> MethodStack:
    """Read `snapkv:budget_tokens=512,window_tokens=32 + kivi:bits=4`; `full` is the empty stack.

    Raises:
        BadInput: an unknown method, parameter or value.
    """
    parts = [part.strip() for part in text.split("+") if part.strip()]
    return MethodStack(tuple(parse_method(part) for part in parts if part != "full"))


def parse_method(text: str) -> Method:
    """Read one method as `name` or `name:parameter=value,...`.

    Raises:
        BadInput: an unknown method, parameter or value.
    """
    import yaml
    from pydantic import ValidationError

    name, _, rest = text.partition(":")
    known = methods()
    if name not in known:
        raise BadInput(f"unknown method {name!r}", fix="one of: " + ", ".join(sorted(known)))
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    try:
        return known[name](**{key.strip(): yaml.safe_load(value) for key, _, value in pairs})
    except (ValidationError, yaml.YAMLError) as error:
        fields = ", ".join(known[name].model_fields) or "none"
        raise BadInput(f"{text}: {error}", fix=f"parameters of {name}: {fields}") from error


def _full_bytes(shape: PlaneShape, held: History) -> int:
    return shape.full_bytes(held.tokens)


def _full_selected(shape: PlaneShape, held: History, tokens: int) -> int:
    return shape.full_bytes(tokens)


def _selected(store: StoreMethod, inner: SelectedBytes) -> SelectedBytes:
    return lambda shape, held, tokens: store.selected_through(shape, held, tokens, inner)


def _chain(stores: Sequence[StoreMethod], observed: Mapping[str, int] | None) -> PlaneBytes:
    formula: PlaneBytes = _full_bytes
    for store in reversed(stores):
        formula = _bytes(store, formula, observed)
    return formula


def _build(store: StoreMethod, inner: PlaneFactory) -> Callable[[PlaneContext], Plane]:
    return lambda ctx: store.plane(ctx, inner)


def _bytes(
    store: StoreMethod, inner: PlaneBytes, observed: Mapping[str, int] | None
) -> Callable[[PlaneShape, History], int]:
    return lambda shape, held: store.plane_bytes(shape, held, inner, observed)
