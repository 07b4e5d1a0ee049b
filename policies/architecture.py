"""What the architecture methods share: they read a config, count alternatives, and refuse.

All bytes come from `read_model_cache`; an alternative is a `ModelCache` with other rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeGuard

from kvtune.errors import BadInput
from kvtune.policies.method import ArchitectureMethod, Method, Need, Saves, methods
from kvtune.policies.model_cache import ModelCache, read_model_cache
from kvtune.policies.model_families import find_family
from kvtune.policies.model_layers import Kind, LayerCache, Rows
from kvtune.types import Harm

ATTENTION = frozenset({Kind.FULL, Kind.WINDOW, Kind.CHUNK, Kind.LATENT, Kind.SHARED})
"""Kinds of rows that are the keys and values of attention."""
YOCO_WINDOW_TOKENS = 1024
SOURCE = "the model config"


class CheckpointArchitecture(ArchitectureMethod):
    """An architecture that shows in what a model's layers keep.

    It is lossless in kvtune's sense: nothing is done to a checkpoint that has it. Its quality was
    settled in training. Every method below raises `BadInput` for a config whose cache is not known
    exactly.
    """

    acts: ClassVar[Literal["prefill", "decode", "both", "training"]] = "training"
    needs: ClassVar[tuple[Need, ...]] = (Need.TRAINING,)
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[tuple[Saves, ...]] = (Saves.CAPACITY, Saves.BANDWIDTH)
    retrofit: ClassVar[str]
    """Why a checkpoint cannot be given it, as a sentence without its full stop."""

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """What the model keeps is its plain cache."""
        return "plain"

    @abstractmethod
    def present(self, cache: ModelCache) -> bool:
        """Whether layers that keep this have the architecture."""

    @abstractmethod
    def remarks(self, cache: ModelCache) -> Sequence[str]:
        """What it means for the other methods on a model that has it."""

    def detect(self, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json has the architecture."""
        return self.present(read_model_cache(config, SOURCE))

    def bytes_per_token(
        self, config: Mapping[str, Any], tokens: int = 0, element_bytes: int = 2
    ) -> int:
        """Bytes that the token after the first `tokens` adds, numbers taking `element_bytes`.

        Raises:
            BadInput: the model does not have the architecture.
        """
        self.require(config)
        return read_model_cache(config, SOURCE).bytes_per_token(tokens, element_bytes)

    def advise(self, config: Mapping[str, Any]) -> list[str]:
        """What it means for this model, and what models of the same size would hold.

        On a model that lacks it: why it stays so, and what it would hold with it.
        """
        cache = read_model_cache(config, SOURCE)
        others = alternatives(cache, _head_dim(config, cache))
        if self.present(cache):
            return [*self.remarks(cache), *(_compared(cache, other) for other in others)]
        wanted = [other for other in others if other.method == self.name]
        lacks = f"this model has no {self.title}: {describe(cache)}; {self.retrofit}"
        return [lacks, *(_compared(cache, other) for other in wanted)]

    def require(self, config: Mapping[str, Any]) -> None:
        """Raise unless the model has the architecture.

        Raises:
            BadInput: it does not, and this cannot be retrofitted; with the reason.
        """
        cache = read_model_cache(config, SOURCE)
        if not self.present(cache):
            raise BadInput(
                f"{cache.architecture} has no {self.title}: {describe(cache)}; {self.retrofit}",
                fix=f"choose a checkpoint that was trained with {self.title}",
            )


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a model with as many layers and query heads, and as wide heads, would keep.

    `method` is the architecture's name in the registry, `mha` for one KV head a query head.
    """

    method: str
    title: str
    cache: ModelCache


def attention_rows(cache: ModelCache) -> tuple[Rows, ...]:
    """The keys and values that each attention layer keeps, or reads of another layer."""
    return tuple(rows for layer in cache.layers for rows in layer if _attends(rows))


def kv_heads(cache: ModelCache) -> frozenset[int]:
    """How many KV heads attention layers have.

    Empty where there are none, or some keep rows of another sort (latent, compressed).
    """
    rows = attention_rows(cache)
    if Kind.COMPRESSED in _kinds(cache) or any(each.value_dim == 0 for each in rows):
        return frozenset()
    return frozenset(each.heads for each in rows)


def cache_owners(cache: ModelCache) -> tuple[int | None, ...]:
    """The layer whose rows each layer reads: its own, an earlier one's, or None without attention.

    A reader takes those of the last layer before it that keeps the same rows. (In a config whose
    window spans the longest sequence, windowed and full layers cannot be told apart.)
    """
    owners: list[int | None] = []
    kept: dict[Rows, int] = {}
    for index, layer in enumerate(cache.layers):
        found = next((rows for rows in layer if _attends(rows)), None)
        if found is None:
            owners.append(None)
        elif found.owned:
            kept[found.shared()] = index
            owners.append(index)
        else:
            owners.append(kept[found])
    return tuple(owners)


def alternatives(cache: ModelCache, head_dim: int) -> tuple[Alternative, ...]:
    """The same model with other attention: MHA, GQA with 8 heads, MQA, MLA, YOCO.

    Windows, states and shared layers stay as they are but in YOCO. MLA has DeepSeek-V2's
    proportions: a latent of 4 heads and a rotary key of half of one (2405.04434). YOCO has windows
    of 1,024 tokens in the first half of the attention layers, and this model's KV heads, or 8 where
    it has none. What the model has itself is left out, and everything where it compresses tokens:
    then a head of another model is no measure.
    """
    queries = cache.query_heads
    if queries is None or not attention_rows(cache) or Kind.COMPRESSED in _kinds(cache):
        return ()
    grouped = 8 if queries > 8 and queries % 8 == 0 else None
    own = max(kv_heads(cache), default=grouped or queries)
    found = [Alternative("mha", f"MHA ({queries} KV heads)", _headed(cache, queries, head_dim))]
    if grouped:
        found.append(Alternative("gqa", "GQA (8 KV heads)", _headed(cache, grouped, head_dim)))
    found.append(Alternative("mqa", "MQA (1 KV head)", _headed(cache, 1, head_dim)))
    kinds = _kinds(cache)
    if Kind.LATENT not in kinds:
        width = _latent_width(head_dim)
        found.append(Alternative("mla", f"MLA (rows of {width})", _latent(cache, head_dim)))
    if Kind.SHARED not in kinds:
        found.append(Alternative("yoco", f"YOCO (KV heads: {own})", _yoco(cache, own, head_dim)))
    return tuple(other for other in found if other.cache.layers != cache.layers)


def describe(cache: ModelCache) -> str:
    """What a model's attention keeps, in a few words."""
    if not attention_rows(cache):
        return "it has no layers that keep keys and values"
    heads = kv_heads(cache)
    if heads:
        each = " or ".join(str(count) for count in sorted(heads))
        noun = "KV head" if heads == {1} else "KV heads"
        return f"its attention layers have {each} {noun} for {cache.query_heads} query heads"
    kept = ", ".join(sorted(kind.value for kind in _kinds(cache)))
    return f"its layers keep rows for all heads together ({kept})"


def names_of(base: type[Method] | tuple[type[Method], ...], where: Callable[[Any], bool]) -> str:
    """The registry's methods of a class for which `where` holds, as a list in words."""
    found = [
        name for name, cls in sorted(methods().items()) if issubclass(cls, base) and where(cls)
    ]
    return ", ".join(found)


def replicated(cache: ModelCache, ranks: int) -> str | None:
    """Say what a token takes on each of several tensor-parallel devices if that is not its share.

    None where the bytes are shared evenly, or the model cannot be split over so many.
    """
    try:
        each = cache.bytes_per_token(tensor_parallel=ranks)
    except BadInput:
        return None
    whole = cache.bytes_per_token()
    if each * ranks <= whole:
        return None
    return (
        f"with tensor parallelism over {ranks} devices each holds {each:,} B of a token's "
        f"{whole:,} B: what cannot be split is held by all"
    )


def _attends(rows: LayerCache) -> TypeGuard[Rows]:
    return isinstance(rows, Rows) and rows.kind in ATTENTION


def _kinds(cache: ModelCache) -> frozenset[Kind]:
    return frozenset(kind for layer in cache.layer_kinds for kind in layer)


def _head_dim(config: Mapping[str, Any], cache: ModelCache) -> int:
    """How wide a head is; of latent attention, that of its values."""
    rows = attention_rows(cache)
    if any(each.kind is Kind.LATENT for each in rows):
        _, entries = find_family(config, SOURCE)
        return entries.count("v_head_dim")
    return max((each.key_dim for each in rows), default=0)


def _rebuilt(cache: ModelCache, change: Callable[[int, Rows], Rows]) -> ModelCache:
    """The cache with other attention rows; `change` is given their number among these.

    Indexes go: they serve latent rows.
    """
    number = -1
    layers: list[tuple[LayerCache, ...]] = []
    for layer in cache.layers:
        built: list[LayerCache] = []
        for held in layer:
            if _attends(held):
                number += 1
                built.append(change(number, held))
            elif held.kind is not Kind.INDEX:
                built.append(held)
        layers.append(tuple(built))
    return replace(cache, layers=tuple(layers))


def _headed(cache: ModelCache, heads: int, dim: int) -> ModelCache:
    def change(_: int, rows: Rows) -> Rows:
        if rows.kind is Kind.LATENT:
            return Rows(Kind.FULL, heads, dim, dim)
        return replace(rows, heads=heads)

    return _rebuilt(cache, change)


def _latent_width(dim: int) -> int:
    return 4 * dim + dim // 2


def _latent(cache: ModelCache, dim: int) -> ModelCache:
    def change(_: int, rows: Rows) -> Rows:
        kind = Kind.LATENT if rows.kind is Kind.FULL else rows.kind
        return replace(rows, kind=kind, heads=1, key_dim=_latent_width(dim), value_dim=0)

    return _rebuilt(cache, change)


def _yoco(cache: ModelCache, heads: int, dim: int) -> ModelCache:
    half = len(attention_rows(cache)) // 2
    whole = Rows(Kind.FULL, heads, dim, dim)
    window = replace(whole, kind=Kind.WINDOW, span_tokens=YOCO_WINDOW_TOKENS)

    def change(number: int, _: Rows) -> Rows:
        if number < half:
            return window
        return whole if number == half else whole.shared()

    return _rebuilt(cache, change)


def _compared(cache: ModelCache, other: Alternative) -> str:
    """One alternative against the model, at the longest sequence of the model."""
    tokens = cache.max_tokens or 4096
    own, its = cache.bytes_at(tokens), other.cache.bytes_at(tokens)
    return (
        f"{other.title} of the same size would hold {_size(its)} at {tokens:,} tokens, "
        f"{its / own:.3g} times this model's {_size(own)}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
