"""What the reference engine takes from its tiers: blocks worth loading, and whole sequences."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvtune.engines.reference.sequence import Parked
from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.engines.reference.tiers import TierStore
from kvtune.errors import BadInput
from kvtune.policies.methods.tiers import Tiers
from kvtune.policies.plane import Plane, planes_within, tensor_bytes
from kvtune.policies.tiering import Plan, Speeds, Tier, plan_loading

if TYPE_CHECKING:
    from kvtune.engines.reference.engine import ReferenceEngine

PROBE_TOKENS = 128
Tensors = dict[str, Tensor]


class Loading:
    """A store, and what is known of its speeds; they are measured before the first plan."""

    def __init__(self, engine: ReferenceEngine, store: TierStore) -> None:
        self._engine = engine
        self.store = store
        self.speeds: Speeds | None = None
        self.plans: list[Plan] = []

    def load(self, keys: Sequence[str], prompt_tokens: int, block_tokens: int) -> Iterator[Tensors]:
        """Yield the leading blocks that have `prompt_tokens` tokens ready soonest.

        A block that turns out to be gone ends them; what follows is computed.
        """
        tiers = list(itertools.takewhile(bool, map(self.store.tier_of, keys)))
        if not tiers:
            return
        if self.speeds is None:
            self.speeds = measure_speeds(self._engine, self.store)
        plan = plan_loading(
            [tier for tier in tiers if tier],
            prompt_tokens=prompt_tokens,
            block_tokens=block_tokens,
            block_bytes=self.store.bytes_of(keys[0]),
            speeds=self.speeds,
        )
        self.plans.append(plan)
        for key in keys[: plan.blocks]:
            tensors = self.store.get(key)
            if tensors is None:
                return
            yield tensors


def loading(engine: ReferenceEngine, method: Tiers) -> Loading:
    """The tiers of an engine under a method; they are made when they are first asked for."""
    key = ("tiers", method)
    found: Loading | None = engine.shared.get(key)
    if found is None:
        found = engine.shared[key] = Loading(engine, TierStore(method, engine.device))
    return found


def measure_speeds(engine: ReferenceEngine, store: TierStore) -> Speeds:
    """Time the links of a store, and the model on a prompt of `PROBE_TOKENS` tokens.

    On a CPU the host's link is a copy within memory.
    """
    vocabulary = int(engine.model.config.vocab_size)
    prompt = [token % vocabulary for token in range(PROBE_TOKENS)]
    for _ in range(2):  # The first pass pays for what is set up once.
        began = time.perf_counter()
        float(engine.prefill([engine.start()], [prompt])[0].sum())
        elapsed = time.perf_counter() - began
    links: dict[Tier, float] = store.probe()
    # A disk that could not be probed is never worth waiting for.
    return Speeds({"host": links["host"], "disk": links.get("disk", 1e-9)}, elapsed / PROBE_TOKENS)


def swap_out(engine: ReferenceEngine, sequence: CachedSequence) -> Tier | None:
    """Move a sequence's keys and values to a tier; None: no tier has room, and nothing moved.

    Raises:
        BadInput: its stack has no tiers, or it is swapped out already.
    """
    if sequence.parked is not None:
        raise BadInput("the sequence is swapped out already", fix="swap it in first")
    store = loading(engine, _tiers(sequence)).store
    observed = dataclasses.replace(sequence.observed(), swapped_out=True)
    planes = dict(_planes(sequence))
    held = {number: plane.swap_out() for number, plane in planes.items()}
    tensors = {
        f"{number}.{name}": tensor
        for number, parts in held.items()
        for name, tensor in parts.items()
    }
    count = engine.shared.setdefault("swapped sequences", itertools.count())
    key = f"sequence-{next(count)}"
    tier = store.put(key, tensors)
    if tier is None:
        for number, plane in planes.items():
            plane.swap_in(held[number])
        return None
    sequence.parked = Parked(key, tensor_bytes(tensors), observed)
    return tier


def swap_in(engine: ReferenceEngine, sequence: CachedSequence) -> bool:
    """Bring a sequence back; False: what was moved is lost, and it was computed again.

    It is computed as one prompt and the tokens generated after it.

    Raises:
        BadInput: it is not swapped out, or it is lost and was put together from modules.
    """
    if sequence.parked is None:
        raise BadInput("the sequence is not swapped out", fix="swap it out first")
    store = loading(engine, _tiers(sequence)).store
    tensors = store.get(sequence.parked.key)
    if tensors is None:
        _compute_again(engine, sequence)
        return False
    held: dict[int, Tensors] = {number: {} for number, _ in _planes(sequence)}
    for key, tensor in tensors.items():
        owner, name = key.split(".", 1)
        held[int(owner)][name] = tensor
    for number, plane in _planes(sequence):
        plane.swap_in(held[number])
    store.drop(sequence.parked.key)
    sequence.parked = None
    return True


def _compute_again(engine: ReferenceEngine, sequence: CachedSequence) -> None:
    if sequence.stack.leaves_gaps and sequence.reused_tokens:
        raise BadInput("a sequence of modules is lost", fix="serve its prompt again")
    warnings.warn("a swapped-out sequence is lost, and is computed again", stacklevel=3)
    exact = sequence.layers[0].setup.exact_prefill
    fresh = engine.start(sequence.stack, sequence.spans, exact_prefill=exact)
    engine.prefill([fresh], [sequence.token_ids[: sequence.prompt_tokens]])
    for token in sequence.token_ids[sequence.prompt_tokens :]:
        engine.decode([fresh], [[token]])
    sequence.layers, sequence.reused_tokens = fresh.layers, fresh.reused_tokens
    sequence.parked = None


def _planes(sequence: CachedSequence) -> Iterator[tuple[int, Plane]]:
    """Every plane once, numbered; what lies inside others comes after them."""
    seen: set[int] = set()
    for layer in sequence.layers:
        for outer in layer.planes():
            for plane in planes_within(outer):
                if id(plane) not in seen:
                    seen.add(id(plane))
                    yield len(seen), plane


def _tiers(sequence: CachedSequence) -> Tiers:
    found = [method for method in sequence.stack.methods if isinstance(method, Tiers)]
    if not found:
        raise BadInput(
            f"{sequence.stack} has no tiers to move a sequence to", fix="add tiers to the stack"
        )
    return found[0]
