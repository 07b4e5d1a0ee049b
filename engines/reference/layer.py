"""The cache of one layer of one sequence: what it holds, reads, drops, and how many bytes.

During the prompt the layer attends in full precision to what was staged (`exact_prefill`) and
compresses at the prompt's end, so that a prompt in chunks ends up as one in a piece. Afterwards
every token is stored, read back and attended to as the stack of methods says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvtune.engines.reference.attention import attend
from kvtune.engines.reference.groups import HeadGroup
from kvtune.engines.reference.layer_setup import LayerSetup
from kvtune.engines.reference.staged import Staged
from kvtune.policies.eviction import Evictor, EvictorContext, Seen, Selector
from kvtune.policies.method import Role
from kvtune.policies.plane import Plane, PlaneContext

T = TypeVar("T")


class LayerCache:
    """One full-attention layer of one sequence under a stack of methods."""

    def __init__(self, setup: LayerSetup) -> None:
        self.setup = setup
        self.stack = setup.stack
        ctx = EvictorContext(
            setup.shape,
            setup.scale,
            setup.softcap,
            setup.dtype,
            setup.device,
            setup.spans,
            setup.sequence,
        )
        self.evictors: list[Evictor] = [method.evictor(ctx) for method in self.stack.evictors]
        selection = self.stack.selection
        self.selector: Selector | None = None if selection is None else selection.selector(ctx)
        self.ctx = ctx
        self.groups = [self._group(range(setup.shape.kv_heads))]
        self.ragged = False
        self.staged: Staged | None = None
        self.read_bytes_per_step = 0
        self.facts_read: dict[Role, dict[str, int]] = {}
        self.scratch_bytes = 0

    @property
    def tokens(self) -> int:
        """Tokens held for the head that holds most."""
        return max(group.tokens for group in self.groups)

    def prefill(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        sees_stored: bool = False,
    ) -> tuple[Tensor, Seen]:
        """Attend for a chunk of the prompt: [Hq, m, d] in, [Hq, m, dv] out, and what was seen.

        With `sees_stored`, it attends to what was stored before the prompt wherever that stands. A
        compact stack counts what is stored from 0, as it does while decoding.
        """
        if self.ragged:
            # Only what a method left of an earlier prompt is ragged; it drops no more.
            self._stage(keys, values, positions)
            out = self._attend_ragged(queries, positions)
            return out, self._seen(queries, positions, keys, values, positions[None])
        seen = self.show(queries, keys, values, positions)
        attended = seen
        if self.stack.compact and self.groups[0].tokens:
            attended = self._compacted(seen)
        elif sees_stored and self.staged is not None and self.setup.window_tokens is None:
            attended = self._with_stored_first(seen, self.staged.positions.shape[1])
        return self._attend(attended, self.setup.window_tokens), seen

    def show(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Seen:
        """Take in a chunk of the prompt, without attending."""
        if self.setup.exact_prefill or self.evictors:
            self._stage(keys, values, positions)
        else:
            self.groups[0].append(_own(keys), _own(values), positions[None])
        seen = self._seen(queries, positions, *self._everything())
        for evictor in self.evictors:
            evictor.observe(seen, "prefill")
        return seen

    def _with_stored_first(self, seen: Seen, staged_tokens: int) -> Seen:
        """Move what is stored before every query, for the mask: rotations are done already."""
        first = int(seen.query_positions[0])
        at = seen.key_positions.clone()
        at[:, :-staged_tokens] = at[:, :-staged_tokens].clamp(max=first)
        return replace(seen, key_positions=at)

    def _compacted(self, seen: Seen) -> Seen:
        """Move queries and keys to where they stand if what is held counts from 0."""
        ranks = torch.arange(seen.keys.shape[1], device=self.setup.device)
        asked_at = ranks[-seen.queries.shape[1] :]
        return replace(
            seen,
            queries=self.setup.rope.move(seen.queries, seen.query_positions, asked_at),
            query_positions=asked_at,
            keys=self.setup.rope.move(seen.keys, seen.key_positions, ranks),
            key_positions=ranks[None],
        )

    def choose(self, seen: Seen) -> Tensor | list[Tensor] | None:
        """Return what the prompt's evictors keep of the staged tokens; None for everything."""
        kept: Tensor | None = None
        for method, evictor in zip(self.stack.evictors, self.evictors, strict=True):
            if method.acts != "decode" and method.scope == "layer":
                kept = evictor.select(seen, "prefill")
                self.scratch_bytes = _nbytes(evictor.scratch())
        return kept

    def finish_prefill(self, kept: Tensor | list[Tensor] | None) -> None:
        """Store the prompt: all of it, or the tokens at `kept` (a list: one tensor a KV head)."""
        staged, self.staged = self.staged, None
        if staged is not None:
            self._store(staged, self._agreed(kept, "prefill"))
        if self.selector is not None:
            self.selector.rebuild(self._attended_keys())

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Store generated tokens and attend: [Hq, m, d] in, [Hq, m, dv] out."""
        settled = self.groups[0].keys.settled_tokens
        heads = self.setup.shape.kv_heads // len(self.groups)
        for number, group in enumerate(self.groups):
            own = slice(number * heads, (number + 1) * heads)
            group.append(keys[own], values[own], positions[None])
        if self.selector is not None:
            self.selector.append(self._attended_keys(), settled)
        window = self.setup.window_tokens
        if window is not None:
            self._slide(window + positions.shape[0] - 1)
        out = self._read_and_attend(queries, positions)
        if window is not None:
            self._slide(window)
        return out

    def score(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Attend to the prompt and to the new tokens, show it, and store nothing."""
        held = zip(self._everything(), (keys, values, positions[None]), strict=True)
        seen = self._seen(queries, positions, *(torch.cat(pair, dim=1) for pair in held))
        for method, evictor in zip(self.stack.evictors, self.evictors, strict=True):
            if method.scope == "sequence":
                evictor.observe(seen, "scoring")
        return self._attend(seen, self.setup.window_tokens)

    def planes(self) -> Iterator[Plane]:
        """The planes of keys and values, by group."""
        for group in self.groups:
            yield from (group.keys, group.values)

    def facts(self) -> dict[Role, dict[str, int]]:
        """What the planes say of their data (of ragged heads: the first one's)."""
        group = self.groups[0]
        return {"key": group.keys.facts(), "value": group.values.facts()}

    @property
    def staged_bytes(self) -> int:
        """Bytes of the prompt that is staged in full precision."""
        return 0 if self.staged is None else _nbytes(self.staged.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this layer owns for this sequence, by name."""
        found: dict[str, Tensor] = {}
        for number, group in enumerate(self.groups):
            found |= {f"group{number}.{name}": x for name, x in group.tensors().items()}
        for number, evictor in enumerate(self.evictors):
            found |= {f"evictor{number}.{name}": x for name, x in evictor.tensors().items()}
        if self.selector is not None:
            found |= {f"selector.{name}": x for name, x in self.selector.tensors().items()}
        if self.staged is not None:
            found |= {f"staged.{name}": x for name, x in self.staged.tensors().items()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors()`."""
        return _nbytes(self.tensors())

    def _group(self, heads: range) -> HeadGroup:
        planes = {}
        for role in ("key", "value"):
            shape = self.setup.shape.plane(role, len(heads))
            planes[role] = self.stack.plane(
                PlaneContext(
                    shape,
                    self.setup.dtype,
                    self.setup.device,
                    self.setup.calibration.get(role, {}),
                    self.setup.sequence,
                    self.setup.engine,
                    heads.start,
                )
            )
        rope = self.setup.rope if self.stack.pre_rope else None
        return HeadGroup(planes["key"], planes["value"], rope, self.stack.tracks_positions)

    def _stage(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        chunk = Staged(_own(keys), _own(values), positions[None])
        self.staged = chunk if self.staged is None else self.staged.followed_by(chunk)

    def _store(self, staged: Staged, kept: Tensor | list[Tensor] | None) -> None:
        if isinstance(kept, list):
            self.ragged = True
            self.groups = [self._group(range(head, head + 1)) for head in range(len(kept))]
            parts = [staged.head(head).at(index[None]) for head, index in enumerate(kept)]
        elif self.ragged:
            parts = [staged.head(head) for head in range(len(self.groups))]
        else:
            self._store_alike(staged, kept)
            return
        for group, some in zip(self.groups, parts, strict=True):
            group.append(some.keys, some.values, some.positions)

    def _store_alike(self, staged: Staged, kept: Tensor | None) -> None:
        group = self.groups[0]
        # Nothing is stored that goes at once, unless it is chosen together with what is there.
        after = kept is not None and group.tokens > 0
        some = staged if kept is None or after else staged.at(kept)
        group.append(some.keys, some.values, some.positions)
        if kept is None:
            return
        if after:
            group.keep(kept)
        for evictor in self.evictors:
            evictor.survived(kept)

    def _attended_keys(self) -> Tensor:
        """The keys of uniform heads as a decode step attends to them."""
        return self.groups[0].read_keys(compact=self.stack.compact)

    def _everything(self, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads of a group hold, stored and staged: keys, values, positions."""
        group, some = self.groups[number], self.staged
        stored = group.read() if group.tokens else None
        if some is None:
            assert stored is not None
            return stored
        if self.ragged:
            some = some.head(number)
        staged = some.keys, some.values, some.positions
        if stored is None:
            return staged
        # Heads that kept different tokens have a row of positions each.
        staged = (*staged[:2], staged[2].expand(len(stored[2]), -1))
        keys, values, positions = (
            torch.cat((old, new), dim=1) for old, new in zip(stored, staged, strict=True)
        )
        return keys, values, positions

    def _seen(
        self, queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, held_at: Tensor
    ) -> Seen:
        return Seen(queries, positions, keys, values, held_at, self.ctx)

    def _attend(self, seen: Seen, window_tokens: int | None) -> Tensor:
        return attend(
            seen.queries,
            seen.keys,
            seen.values,
            seen.query_positions,
            seen.key_positions,
            scale=self.setup.scale,
            softcap=self.setup.softcap,
            window_tokens=window_tokens,
        )

    def _read_and_attend(self, queries: Tensor, positions: Tensor) -> Tensor:
        if self.ragged:
            self.read_bytes_per_step = sum(group.plane_bytes for group in self.groups)
            return self._attend_ragged(queries, positions)
        asked, asked_at = queries, positions
        if self.stack.compact:
            asked_at = self.groups[0].ranks()[0, -queries.shape[1] :]
            asked = self.setup.rope.move(queries, positions, asked_at)
        seen = self._seen(asked, asked_at, *self._read_selected(asked))
        out = self._attend(seen, self._window_if_needed(queries))
        if self.evictors:
            if self.stack.compact or self.selector is not None:
                seen = self._seen(queries, positions, *self.groups[0].read())
            self._evict(seen)
        return out

    def _window_if_needed(self, queries: Tensor) -> int | None:
        return self.setup.window_tokens if queries.shape[1] > 1 else None

    def _evict(self, seen: Seen) -> None:
        for evictor in self.evictors:
            evictor.observe(seen, "decode")
        for method, evictor in zip(self.stack.evictors, self.evictors, strict=True):
            if method.acts == "prefill":
                continue
            kept = self._agreed(evictor.select(seen, "decode"), "decode")
            evictor.scratch()  # The peak counts that of prompts only.
            if kept is None:
                continue
            self.groups[0].keep(kept)
            for other in self.evictors:
                other.survived(kept)
            if self.selector is not None:
                self.selector.rebuild(self._attended_keys())

    def _agreed(self, kept: T, phase: str) -> T:
        """What the layer that this one must follow has kept, or `kept` where it follows none."""
        shape, shared = self.setup.shape, self.setup.sequence
        leader = self.stack.leader(shape)
        if leader is not None:
            # Absent where the leader has a window of its own and is left alone by methods.
            agreed: T = shared.pop(("kept", leader, phase), kept)
            return agreed
        if self.setup.leads:
            shared["kept", shape.index, phase] = kept
        return kept

    def _read_selected(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions that a step attends to: what the selector chose, or all."""
        group, compact = self.groups[0], self.stack.compact
        self.facts_read = self.facts()
        chosen = None
        if self.selector is not None and queries.shape[1] == 1:
            chosen = self.selector.choose(queries[:, 0], group.tokens)
        if self.selector is None or chosen is None:
            self.read_bytes_per_step = group.plane_bytes
            return group.read(compact=compact)
        keys, values, held_at, touched = group.select(chosen, compact=compact)
        self.read_bytes_per_step = _nbytes(self.selector.tensors()) + touched
        return keys, values, held_at

    def _attend_ragged(self, queries: Tensor, positions: Tensor) -> Tensor:
        parts = [
            self._attend(self._seen(asking, positions, *self._everything(head)), None)
            for head, asking in enumerate(queries.chunk(len(self.groups)))
        ]
        return torch.cat(parts)

    def _slide(self, window_tokens: int) -> None:
        """Free what lies before the window (of a layer that was trained with one)."""
        extra = self.groups[0].tokens - window_tokens
        if extra > 0:
            held = torch.arange(extra, self.groups[0].tokens, device=self.setup.device)
            self.groups[0].keep(held[None])


def _own(x: Tensor) -> Tensor:
    """A copy: a view of the projections would keep those of the whole batch alive."""
    return x.clone(memory_format=torch.contiguous_format)


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
