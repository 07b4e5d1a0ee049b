"""Which methods go together: a table of rules, each with its reason.

A refused stack cannot work, or would not do what its parts promise; a note says what a legal stack
gives up. The nearest legal stack changes a parameter where that is enough, and otherwise leaves out
the fewest methods, the later ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from kvtune.errors import BadInput
from kvtune.policies.calibration import CalibratedMethod
from kvtune.policies.method import Axis, Method, StoreMethod, TokenMethod
from kvtune.policies.method_stack import MethodStack


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination, and what to say about it."""

    effect: Literal["refused", "note"]
    reason: str
    applies: Callable[[MethodStack], bool]


def _count(stack: MethodStack, axis: Axis) -> int:
    return sum(method.axis is axis for method in stack.methods)


def _repeats(stack: MethodStack) -> bool:
    names = [method.name for method in stack.methods]
    return len(names) > len(set(names))


def _rivals(stack: MethodStack) -> bool:
    """Two methods that evict in the same phase."""
    acts = [evictor.acts for evictor in stack.evictors]
    at_prompt = sum(phase in ("prefill", "both") for phase in acts)
    while_decoding = sum(phase in ("decode", "both") for phase in acts)
    return at_prompt > 1 or while_decoding > 1


def _ragged(stack: MethodStack) -> bool:
    return any(evictor.heads == "ragged" for evictor in stack.evictors)


def _evicts_while_decoding(stack: MethodStack) -> bool:
    return any(evictor.acts != "prefill" for evictor in stack.evictors)


def _grouped(stack: MethodStack) -> bool:
    """Some store quantizes or approximates tokens together."""
    return any(not store.each_token_alone for store in stack.stores)


def _in_two_forms(stack: MethodStack) -> bool:
    """Some store holds a part of the tokens otherwise than the rest."""
    return any(not store.one_page_kind for store in stack.stores)


def _reuses(stack: MethodStack) -> bool:
    return any(method.axis is Axis.REUSE for method in stack.methods)


def _publishes(stack: MethodStack) -> bool:
    return all(method.publish != "never" for method in stack.methods)


def _pages(stack: MethodStack) -> bool:
    return any(
        isinstance(method, StoreMethod) and method.axis is Axis.PLACEMENT
        for method in stack.methods
    )


RULES = (
    Rule("refused", "a method is named twice", _repeats),
    Rule(
        "refused",
        "two methods evict in the same phase, and each would undo the other's choice",
        _rivals,
    ),
    Rule(
        "refused",
        "two number formats: a second one would quantize what the first already rounded",
        lambda stack: _count(stack, Axis.BITS) > 1,
    ),
    Rule(
        "refused",
        "two low-rank projections: the second finds no redundancy that the first left",
        lambda stack: _count(stack, Axis.DIM) > 1,
    ),
    Rule(
        "refused",
        "two methods merge layers",
        lambda stack: _count(stack, Axis.LAYER) > 1,
    ),
    Rule(
        "refused",
        "two methods choose what a step reads",
        lambda stack: _count(stack, Axis.SELECTION) > 1,
    ),
    Rule(
        "refused",
        "heads of different lengths cannot be merged across layers: a pair of layers must hold the "
        "same tokens",
        lambda stack: _ragged(stack) and _count(stack, Axis.LAYER) > 0,
    ),
    Rule(
        "refused",
        "heads of different lengths cannot share latents",
        lambda stack: _ragged(stack) and any(store.joins_heads for store in stack.stores),
    ),
    Rule(
        "refused",
        "heads whose vectors are merged as one must keep the same tokens while decoding",
        lambda stack: (
            any(store.axis is Axis.LAYER and store.joins_heads for store in stack.stores)
            and any(
                evictor.acts != "prefill" and evictor.heads != "uniform"
                for evictor in stack.evictors
            )
        ),
    ),
    Rule(
        "refused",
        "pages are chosen for all heads of a layer, which need the same number of tokens",
        lambda stack: _ragged(stack) and stack.selection is not None,
    ),
    Rule(
        "refused",
        "heads of different lengths cannot share a block table",
        lambda stack: _ragged(stack) and _pages(stack),
    ),
    Rule(
        "refused",
        "a second eviction while decoding needs heads of one length",
        lambda stack: _ragged(stack) and _evicts_while_decoding(stack),
    ),
    Rule(
        "refused",
        "a store with a full-precision part, with groups over tokens, or with tables of its own "
        "for each sequence needs a second kind of page",
        lambda stack: (
            _pages(stack)
            and any(store.terminal and not store.one_page_kind for store in stack.stores)
        ),
    ),
    Rule(
        "refused",
        "a projection in front of a format with groups over tokens: latents change their basis or "
        "scale as tokens come, so only formats that store each token alone can follow",
        lambda stack: (
            any(store.rebases for store in stack.stores)
            and any(
                store.axis is Axis.BITS and not store.each_token_alone for store in stack.stores
            )
        ),
    ),
    Rule(
        "refused",
        "a format that was calibrated on keys and values, inside one that turns them into other "
        "vectors: what was learned does not hold for those",
        lambda stack: (
            any(store.axis in (Axis.LAYER, Axis.DIM) for store in stack.stores)
            and any(
                store.axis is Axis.BITS and isinstance(store, CalibratedMethod)
                for store in stack.stores
            )
        ),
    ),
    Rule(
        "note",
        "evicting token by token rebuilds the groups of this store each time: its error is added "
        "again, and it costs a pass over the cache",
        lambda stack: _evicts_while_decoding(stack) and _grouped(stack),
    ),
    Rule(
        "note",
        "blocks stay private: what is kept depends on later tokens, so no other request may use "
        "them",
        lambda stack: _reuses(stack) and not _publishes(stack),
    ),
    Rule(
        "note",
        "the reference engine keeps blocks private: it shares neither what a method chose from the "
        "whole prompt nor tokens that are stored in groups or in two forms",
        lambda stack: (
            _reuses(stack)
            and _publishes(stack)
            and (bool(stack.evictors) or _grouped(stack) or _in_two_forms(stack))
        ),
    ),
    Rule(
        "note",
        "the second method may drop what the first kept of the prompt, unless it is protected",
        lambda stack: len(stack.evictors) > 1,
    ),
)


def refusals(stack: MethodStack) -> tuple[str, ...]:
    """Why a stack cannot run; empty if it can."""
    return tuple(rule.reason for rule in RULES if rule.effect == "refused" and rule.applies(stack))


def notes(stack: MethodStack) -> tuple[str, ...]:
    """What a legal stack gives up."""
    return tuple(rule.reason for rule in RULES if rule.effect == "note" and rule.applies(stack))


def nearest_legal(stack: MethodStack) -> MethodStack:
    """The legal stack closest to a refused one; the stack itself if it is legal."""
    return next(candidate for candidate in _candidates(stack) if not refusals(candidate))


def require_legal(stack: MethodStack) -> None:
    """Raise unless the methods go together.

    Raises:
        BadInput: with each reason, and the nearest legal stack.
    """
    reasons = refusals(stack)
    if reasons:
        raise BadInput(
            f"{stack} cannot be one stack: " + "; ".join(reasons),
            fix=f"the nearest that works is {nearest_legal(stack)}",
        )


def publish_of(stack: MethodStack) -> Literal["plain", "fingerprint", "never"]:
    """How a prefix cache may share what a stack stores: as its most private method says."""
    order = ("plain", "fingerprint", "never")
    return max((method.publish for method in stack.methods), key=order.index, default="plain")


def _candidates(stack: MethodStack) -> Iterator[MethodStack]:
    """The stack, then milder parameters, then ever fewer methods; the empty stack comes last."""
    yield stack
    for number, method in enumerate(stack.methods):
        for milder in _milder(method):
            yield MethodStack((*stack.methods[:number], milder, *stack.methods[number + 1 :]))
    for size in range(len(stack.methods) - 1, -1, -1):
        for kept in combinations(stack.methods, size):
            yield MethodStack(kept)


def _milder(method: Method) -> tuple[Method, ...]:
    if isinstance(method, TokenMethod):
        return method.uniform_variants
    return method.apart_variants if isinstance(method, StoreMethod) else ()
