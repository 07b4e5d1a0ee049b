"""The contract of a KV-cache method: a system from the literature as a policy with exact bytes.

A method is one file in `policies/methods/` with one class that declares `name`. Its class
variables say what it is; its fields are its parameters; its formulas give bytes without running
anything; its factories build the running parts, which the reference engine drives. Files of
methods import without torch: what runs is imported when it runs.

Four kinds: a `StoreMethod` holds token vectors in another format (bits, low rank, merged layers,
pages), a `TokenMethod` drops tokens, a `SelectionMethod` reads only some, an `ArchitectureMethod`
is a property of the checkpoint. Methods that reuse or move whole caches are plain `Method`s that
the engine calls by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from kvtune.registry import discover
from kvtune.types import Harm, fingerprint_of

if TYPE_CHECKING:
    from kvtune.policies.eviction import Evictor, EvictorContext, Selector
    from kvtune.policies.plane import Plane, PlaneContext

Role = Literal["key", "value"]


class Axis(StrEnum):
    """What a method acts on."""

    PLACEMENT = "placement"
    REUSE = "reuse"
    TOKEN = "token"
    SELECTION = "selection"
    LAYER = "layer"
    HEAD = "head"
    DIM = "dim"
    BITS = "bits"


class Saves(StrEnum):
    """What a method buys."""

    WASTE = "waste"
    CAPACITY = "capacity"
    BANDWIDTH = "bandwidth"
    PREFILL = "prefill"


class Need(StrEnum):
    """What a method needs besides the model and the request."""

    CALIBRATION = "calibration"
    WEIGHTS = "weights"
    KERNEL = "kernel"
    SCHEMA = "schema"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Paper:
    """Where a method comes from. `reference` is an arXiv number, a venue, or a project."""

    title: str
    reference: str
    year: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One way in which a method can be run."""

    where: Literal["vllm", "kvtune-plugin", "reference"]
    how: str
    version: str = ""
    platforms: tuple[str, ...] = ("cpu", "cuda")


REFERENCE = Serving("reference", "kvtune.engines.reference")


@dataclass(frozen=True, slots=True)
class History:
    """What was put into a cache: tokens held after the prompt at once, and tokens appended since.

    After an eviction that rebuilds a cache, all survivors count as `at_once`.
    """

    at_once: int
    appended: int = 0

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.at_once + self.appended


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One full-attention layer: what the formulas of a method need."""

    index: int
    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """One token of one KV head in full precision: key and value."""
        return (self.key_dim + self.value_dim) * self.element_bytes

    def plane(self, role: Role, heads: int | None = None) -> PlaneShape:
        """The keys or values of this layer (of `heads` of its KV heads) as a plane."""
        width = self.key_dim if role == "key" else self.value_dim
        return PlaneShape(
            role, heads or self.kv_heads, width, self.element_bytes, self.index, self.layers
        )


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """A plane [heads, tokens, width]: the keys or the values of one layer, or what stands for them.

    `element_bytes` is what one number takes in full precision.
    """

    role: Role
    heads: int
    width: int
    element_bytes: int
    layer: int
    layers: int

    def resized(self, heads: int, width: int) -> PlaneShape:
        """The same plane with other heads and width."""
        return replace(self, heads=heads, width=width)

    def full_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` tokens in full precision."""
        return self.heads * tokens * self.width * self.element_bytes


PlaneBytes = Callable[[PlaneShape, History], int]
"""The formula of what lies inside a wrapping method."""
SelectedBytes = Callable[[PlaneShape, History, int], int | None]
"""The formula of reading some tokens of what lies inside a wrapping method; None: all of it."""
PlaneFactory = Callable[["PlaneContext"], "Plane"]
"""Builds what lies inside a wrapping method."""


class Method(BaseModel, ABC):
    """A KV-cache method and its parameters.

    `acts` is the phase in which it does its work. `leaves_gaps` says that positions of a sequence
    need not follow each other even if nothing is dropped. `publish` says under which key a prefix
    cache may share what it stores: `plain`, with the method's `fingerprint` as an extra key, or
    `never`, because the content depends on later tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    title: ClassVar[str]
    axis: ClassVar[Axis]
    harm: ClassVar[Harm]
    saves: ClassVar[tuple[Saves, ...]]
    acts: ClassVar[Literal["prefill", "decode", "both", "training"]]
    needs: ClassVar[tuple[Need, ...]] = ()
    leaves_gaps: ClassVar[bool] = False
    serving: ClassVar[tuple[Serving, ...]] = (REFERENCE,)
    paper: ClassVar[Paper]
    summary: ClassVar[str]

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """How a prefix cache may share what this method stores."""
        return "fingerprint"

    @property
    def fingerprint(self) -> str:
        """Identifies the method with its parameters."""
        return fingerprint_of([self.name, self.model_dump(mode="json")])

    def __str__(self) -> str:
        changed = self.model_dump(mode="json", exclude_defaults=True)
        text = ",".join(f"{name}={value}" for name, value in changed.items())
        return f"{self.name}:{text}" if text else self.name


class StoreMethod(Method):
    """Holds token vectors in another format.

    `key_space` says on which keys it works: after RoPE, as attention uses them, or before it, in
    which case the engine takes the rotation off before storing and puts it on after reading.
    A wrapping method stores through `inner`, which is what follows it in the stack, full precision
    at last; a terminal method ignores it. `rebases` says that stored vectors are re-expressed
    later.
    """

    key_space: ClassVar[Literal["post-rope", "pre-rope"]] = "post-rope"
    terminal: ClassVar[bool] = True
    rebases: ClassVar[bool] = False

    @property
    def joins_heads(self) -> bool:
        """Whether one stored vector covers several heads of a token."""
        return False

    @property
    def apart_variants(self) -> tuple[StoreMethod, ...]:
        """This method with heads held apart, for stacks that need it; empty: there is none."""
        return ()

    @property
    def each_token_alone(self) -> bool:
        """Whether what is stored of a token depends on no other token."""
        return True

    @property
    def one_page_kind(self) -> bool:
        """Whether pages of one kind can hold it: every token alone, and all in the same format."""
        return self.each_token_alone

    @abstractmethod
    def plane(self, ctx: PlaneContext, inner: PlaneFactory) -> Plane:
        """Build the empty store of one sequence's keys or values in one layer."""

    @abstractmethod
    def plane_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes that the plane holds for one sequence.

        `observed` are a running plane's `facts()`, for methods whose size depends on the data;
        without them the formula estimates.
        """

    def inner_shape(self, shape: PlaneShape) -> PlaneShape | None:
        """The plane that a wrapping method stores through `inner`; None: it builds none there."""
        return shape

    def leader(self, layer: int, layers: int) -> int | None:
        """The layer whose choice of tokens `layer` of `layers` must follow; None: it is free."""
        return None

    def borrowed_bytes(
        self,
        shape: PlaneShape,
        held: History,
        inner: PlaneBytes,
        observed: Mapping[str, int] | None = None,
    ) -> int:
        """Bytes of other layers' planes that reading this one touches (outermost stores only)."""
        return 0

    def passing_bytes(self, shape: PlaneShape, held: History, own_bytes: int) -> int:
        """Bytes above `own_bytes`, those of the plane, that storing a prompt takes for a moment.

        They wait for another layer, or were freed in one just then (outermost stores only).
        """
        return 0

    def constant_bytes(self, shape: PlaneShape) -> int:
        """Bytes shared by all sequences: codebooks, projections, channel ranges."""
        return 0

    def constants_bytes(self, shapes: Sequence[PlaneShape]) -> int:
        """Bytes shared by all sequences, over all planes: tables of several planes count once."""
        return sum(self.constant_bytes(shape) for shape in shapes)

    def selected_bytes(self, shape: PlaneShape, held: History, tokens: int) -> int | None:
        """Bytes read to fetch `tokens` of the tokens of each head; None: all of the plane."""
        return None

    def selected_through(
        self, shape: PlaneShape, held: History, tokens: int, inner: SelectedBytes
    ) -> int | None:
        """`selected_bytes` of a wrapping method that adds to what is read inside."""
        return self.selected_bytes(shape, held, tokens)


class TokenMethod(Method):
    """Drops tokens.

    `fairness` shares the budget among the spans of a prompt in proportion to their lengths.
    Protected spans of a sequence are kept by every token method.
    """

    scope: ClassVar[Literal["layer", "sequence"]] = "layer"

    fairness: Literal["none", "proportional"] = "none"

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Which tokens survive depends on later queries unless a method knows better."""
        return "never"

    @property
    def heads(self) -> Literal["uniform", "per-head", "ragged"]:
        """Whether KV heads hold the same tokens, different ones, or even different numbers."""
        return "per-head"

    @property
    def position_mode(self) -> Literal["keep", "compact"]:
        """Whether survivors keep their positions or are rotated to 0..n-1."""
        return "keep"

    @property
    def uniform_variants(self) -> tuple[TokenMethod, ...]:
        """This method with heads of one length, for stacks that need it; empty: there is none."""
        return ()

    @abstractmethod
    def evictor(self, ctx: EvictorContext) -> Evictor:
        """Build what watches one layer of one sequence and chooses the survivors."""

    @abstractmethod
    def history(self, seen: History, layer: LayerShape) -> History:
        """What is held for each KV head after `seen` (prompt, decoded) tokens.

        For ragged heads it is the mean, rounded down.
        """

    @abstractmethod
    def own_bytes(self, seen: History, layer: LayerShape) -> int:
        """Bytes of scores, counts and stored queries of one layer (positions not included)."""

    def scratch_bytes(self, prompt_tokens: int, layer: LayerShape) -> int:
        """Bytes of the scores that live while the prompt is compressed, above what is held."""
        return 0


class SelectionMethod(Method):
    """Keeps everything and reads only part of it in each decode step."""

    @abstractmethod
    def selector(self, ctx: EvictorContext) -> Selector:
        """Build what chooses the tokens that one layer of one sequence reads."""

    @abstractmethod
    def index_bytes(self, tokens: int, layer: LayerShape) -> int:
        """Bytes of the summaries held to choose by."""

    @abstractmethod
    def selected_tokens(self, tokens: int, layer: LayerShape) -> int:
        """How many of `tokens` cached tokens each KV head reads in a step."""


class ArchitectureMethod(Method):
    """A property of the checkpoint: detected, accounted for, advised on, never switched on."""

    @abstractmethod
    def detect(self, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json has the architecture."""

    @abstractmethod
    def bytes_per_token(
        self, config: Mapping[str, Any], tokens: int = 0, element_bytes: int = 2
    ) -> int:
        """Bytes that the token after the first `tokens` adds to the cache of one sequence.

        Raises:
            BadInput: the model does not have the architecture.
        """

    @abstractmethod
    def advise(self, config: Mapping[str, Any]) -> Sequence[str]:
        """What the architecture means for this model: costs of alternatives, methods that fall."""

    @abstractmethod
    def require(self, config: Mapping[str, Any]) -> None:
        """Raise unless the model has the architecture.

        Raises:
            BadInput: it does not, and this cannot be retrofitted; with the reason.
        """


def methods() -> dict[str, type[Method]]:
    """Return every method by name: those in this folder, then those of other distributions."""
    return discover("kvtune.policies.methods", Method, group="kvtune.methods")
