"""Prefix caching in the reference engine: blocks of stored tokens that later prompts start from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvtune.engines.reference.loading import Loading, loading
from kvtune.engines.reference.sequence import Sequence
from kvtune.policies.calibration import CalibratedMethod
from kvtune.policies.compose import publish_of
from kvtune.policies.method import Axis, Method
from kvtune.policies.methods.prefix_caching import BlockMap, PrefixCaching
from kvtune.policies.methods.tiers import Tiers
from kvtune.policies.plane import Piece
from kvtune.types import fingerprint_of

if TYPE_CHECKING:
    from kvtune.engines.reference.engine import ReferenceEngine


@dataclass(frozen=True, slots=True)
class Block:
    """The same tokens of every layer: keys and values as they are stored."""

    layers: tuple[tuple[Piece, Piece], ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all layers; those of a shared page count here too."""
        return sum(piece.nbytes for pair in self.layers for piece in pair)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by layer, role and name, as `of` takes them."""
        return {
            f"{layer}.{role}.{name}": tensor
            for layer, pair in enumerate(self.layers)
            for role, piece in enumerate(pair)
            for name, tensor in piece.tensors.items()
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Block:
        """Put together what `tensors` gave."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            layer, role, name = key.split(".", 2)
            found.setdefault((int(layer), int(role)), {})[name] = tensor
        layers = range(len(found) // 2)
        return cls(tuple((Piece(found[n, 0]), Piece(found[n, 1])) for n in layers))

    def release(self) -> None:
        """Let go of shared pages."""
        for pair in self.layers:
            for piece in pair:
                piece.release()


class PrefixCache:
    """The blocks that the sequences of an engine left behind under one prefix-caching method."""

    def __init__(self, method: PrefixCaching, behind: Loading | None = None) -> None:
        self.method = method
        self.behind = behind
        self.blocks: BlockMap[Block] = BlockMap(method.capacity_blocks, self._leave)
        self.asked_tokens = 0
        self.found_tokens = 0
        self.loaded_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks.blocks.values())

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found, 0 before the first prompt."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def begin(self, sequence: Sequence, prompt: Items[int], root: bytes) -> int:
        """Fill an empty sequence with what is known of its prompt; return how many tokens."""
        keys = self.method.keys(prompt, root)[: self.method.most_blocks(len(prompt))]
        size = self.method.block_tokens
        found = self.blocks.match(keys)
        for number, block in enumerate(found):
            sequence.adopt(block.layers, number * size)
        count = len(found)
        if self.behind is not None:
            names = [key.hex() for key in keys[count:]]
            for tensors in self.behind.load(names, len(prompt) - count * size, size):
                # What was loaded is published with the prompt, from where it lies then.
                sequence.adopt(Block.of(tensors).layers, count * size)
                count += 1
        tokens = count * size
        sequence.token_ids.extend(prompt[:tokens])
        sequence.seen_tokens = sequence.reused_tokens = tokens
        self.asked_tokens += len(prompt)
        self.found_tokens += tokens
        self.loaded_tokens += tokens - len(found) * size
        return tokens

    def publish(self, sequence: Sequence, root: bytes) -> None:
        """Keep the full blocks of a sequence that are not known yet."""
        size = self.method.block_tokens
        keys = self.method.keys(sequence.token_ids, root)
        new = {}
        for number, key in enumerate(keys):
            known = self.blocks.blocks.get(key)
            span = number * size, (number + 1) * size
            new[key] = Block(sequence.share(*span)) if known is None else known
        self.blocks.add(new)

    def _leave(self, key: bytes, block: Block) -> None:
        if self.behind is not None:
            self.behind.store.put(key.hex(), block.tensors())
        block.release()


def prefix_cache(
    engine: ReferenceEngine, method: PrefixCaching, tiers: Tiers | None = None
) -> PrefixCache:
    """The cache of an engine under a method: one for each block size, capacity and tiers behind."""
    behind = None if tiers is None else loading(engine, tiers)
    key = ("prefix-caching", method.block_tokens, method.capacity_blocks, tiers)
    cache: PrefixCache = engine.shared.setdefault(key, PrefixCache(method, behind))
    return cache


def begin(engine: ReferenceEngine, sequence: Sequence, prompt: Items[int]) -> int:
    """Take what an empty sequence's prompt shares with earlier ones; return how many tokens."""
    method = _method(sequence)
    if method is None or sequence.seen_tokens or private_because(sequence):
        return 0
    root = method.root(engine.model_hash, policy_of(engine, sequence.stack.methods))
    return prefix_cache(engine, method, _tiers(sequence)).begin(sequence, prompt, root)


def publish(engine: ReferenceEngine, sequence: Sequence) -> None:
    """Keep the blocks of a sequence for others, if its stack allows it and it holds every token."""
    method = _method(sequence)
    if method is None or private_because(sequence) or not sequence.holds_everything:
        return
    root = method.root(engine.model_hash, policy_of(engine, sequence.stack.methods))
    prefix_cache(engine, method, _tiers(sequence)).publish(sequence, root)


def private_because(sequence: Sequence) -> str | None:
    """Why no other sequence may use a sequence's blocks; None if others may."""
    stack = sequence.stack
    if stack.evictors:
        return "what is kept depends on later tokens, and an evictor must see the whole prompt"
    if publish_of(stack) == "never":
        return "a method's content depends on later tokens"
    if stack.leaves_gaps:
        return "blocks between gaps are not those of a prefix"
    for store in stack.stores:
        if store.rebases or store.axis is Axis.LAYER:
            return f"{store.name} does not store each token of each layer by itself"
    if not sequence.shares_tokens:
        return "a store keeps tokens in groups or in two forms"
    return None


def policy_of(engine: ReferenceEngine, methods: Items[Method]) -> str:
    """Identify the methods that change what is stored, and what they were calibrated with."""
    parts = []
    for method in methods:
        if method.publish == "plain":
            continue
        parts.append(method.fingerprint)
        if isinstance(method, CalibratedMethod):
            parts.append(_calibration_digest(engine, method.calibration_key))
    return fingerprint_of(parts) if parts else ""


def _method(sequence: Sequence) -> PrefixCaching | None:
    return next(
        (method for method in sequence.stack.methods if isinstance(method, PrefixCaching)), None
    )


def _tiers(sequence: Sequence) -> Tiers | None:
    return next((method for method in sequence.stack.methods if isinstance(method, Tiers)), None)


def _calibration_digest(engine: ReferenceEngine, key: str) -> str:
    calibration = engine.calibrations[key]
    known = engine.shared.get(("calibration digest", key))
    if known is None or known[0] is not calibration:
        digest = hashlib.sha256()
        for (layer, role), tensors in sorted(calibration.learned.items()):
            for name, tensor in sorted(tensors.items()):
                digest.update(f"{layer}{role}{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().float().cpu().numpy().tobytes())
        known = calibration, digest.hexdigest()
        engine.shared["calibration digest", key] = known
    return str(known[1])
