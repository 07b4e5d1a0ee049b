"""Bytes of a stack of methods by formula: what the reference engine's tensors must add up to.

Everything is for one sequence on one device, over the full-attention layers given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtune.policies.method import History, LayerShape, Role
from kvtune.policies.method_stack import MethodStack

POSITION_BYTES = 4
Facts = dict[tuple[int, Role], dict[str, int]]
"""What planes say of their data, by layer and role."""
ROLES: tuple[Role, Role] = ("key", "value")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a sequence's cache takes.

    `resident_bytes` are held on the device between steps: data, metadata, residual windows,
    scores, positions. `read_bytes_per_step` are touched by the attention of the latest decode step.
    `peak_bytes` are the most held at once: each layer of the prompt is in full precision, beside
    what it is compressed to and the scores for that, while the layers before it are compressed.
    `remote_bytes` lie on other tiers. `constant_bytes` are shared by all sequences.
    """

    resident_bytes: int
    read_bytes_per_step: int
    peak_bytes: int
    remote_bytes: int = 0
    constant_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """What only a run can tell: tokens kept by each head of ragged layers, and planes' facts.

    `facts` are those after the latest step, `facts_at` those after the prompt (0) and after each
    number of decoded tokens, `facts_read` those when the latest step read. `reused_tokens` of the
    prompt were not computed but taken over, by all layers, before the rest. `swapped_out`: the keys
    and values lie on another tier.
    """

    kept: Mapping[int, Sequence[int]] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    reused_tokens: int = 0
    swapped_out: bool = False
    facts_at: Mapping[int, Facts] = field(default_factory=dict)
    facts_read: Facts = field(default_factory=dict)

    def at(self, decoded_tokens: int) -> Observed:
        """What was known after so many decoded tokens, or at the end if that was not noted."""
        return replace(self, facts=self.facts_at.get(decoded_tokens, self.facts))

    def reading(self) -> Observed:
        """What was known when the latest step read."""
        return replace(self, facts=self.facts | self.facts_read)


def stored_bytes(stack: MethodStack, layers: Sequence[LayerShape], tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens of a prompt, over all layers."""
    held = History(tokens)
    return sum(stack.plane_bytes(layer.plane(role), held) for layer in layers for role in ROLES)


def footprint(
    stack: MethodStack,
    layers: Sequence[LayerShape],
    prompt_tokens: int,
    decoded_tokens: int = 0,
    observed: Observed | None = None,
    *,
    every_step: bool = True,
) -> Footprint:
    """Return the bytes of a sequence after a prompt and `decoded_tokens` decode steps.

    The prompt is processed in one piece. Without `observed`, sizes that depend on the data are the
    methods' estimates. Without `every_step` the peak looks at the prompt and at the end only, not
    at each step between, which takes long for many tokens.
    """
    observed = observed or Observed()
    now = History(prompt_tokens, decoded_tokens)
    # What waits to be compressed is freed in blocks, so that an earlier step may have held more.
    resident = [
        sum(
            _resident(stack, layer, History(prompt_tokens, step), observed.at(step))
            for layer in layers
        )
        for step in (range(decoded_tokens + 1) if every_step else (decoded_tokens,))
    ]
    moved = 0
    if observed.swapped_out:
        held = [(layer, stack.held(now, layer)) for layer in layers]
        moved = sum(_planes(stack, *at, role, observed) for at in held for role in ROLES)
    return Footprint(
        resident_bytes=resident[-1] - moved,
        read_bytes_per_step=sum(_read(stack, layer, now, observed.reading()) for layer in layers),
        peak_bytes=max(_prompt_peak(stack, layers, prompt_tokens, observed.at(0)), *resident),
        remote_bytes=moved,
        constant_bytes=_constants(stack, layers),
    )


def _prompt_peak(
    stack: MethodStack, layers: Sequence[LayerShape], prompt_tokens: int, observed: Observed
) -> int:
    """The most bytes held while the layers of a prompt are compressed, one after another."""
    after_prompt = History(prompt_tokens)
    reused = observed.reused_tokens
    compressed = sum(_taken_over(stack, layer, reused, observed) for layer in layers)
    staged = [layer.kv_heads * layer.slot_bytes * (prompt_tokens - reused) for layer in layers]
    scratch = [_scratch(stack, layer, prompt_tokens) for layer in layers]
    waiting = [0] * len(layers)
    peak = 0
    if any(evictor.scope == "sequence" for evictor in stack.evictors):
        # All layers wait, with what other evictors hold by then, until all tokens are chosen.
        waiting = [
            bytes_ + sum(evictor.own_bytes(after_prompt, layer) for evictor in stack.evictors)
            for bytes_, layer in zip(staged, layers, strict=True)
        ]
        peak = sum(waiting) + sum(scratch)
        scratch = [0] * len(layers)
    for number, layer in enumerate(layers):
        compressed -= _taken_over(stack, layer, reused, observed)
        own = _resident(stack, layer, after_prompt, observed)
        own_peak = own + staged[number] + scratch[number]
        own_peak += _passing(stack, layer, after_prompt, observed)
        peak = max(peak, compressed + own_peak + sum(waiting[number + 1 :]))
        compressed += own
    return peak


def _scratch(stack: MethodStack, layer: LayerShape, prompt_tokens: int) -> int:
    return sum(
        evictor.scratch_bytes(prompt_tokens, layer)
        for evictor in stack.evictors
        if evictor.acts != "decode"
    )


def _resident(stack: MethodStack, layer: LayerShape, seen: History, observed: Observed) -> int:
    held, own, rows = seen, 0, 1
    for evictor in stack.evictors:
        own += evictor.own_bytes(held, layer)
        after = evictor.history(held, layer)
        # All heads share one row of positions until a method drops other tokens from each.
        if after.tokens < held.tokens and evictor.heads != "uniform":
            rows = layer.kv_heads
        held = after
    total = own + sum(_planes(stack, layer, held, role, observed) for role in ROLES)
    if stack.tracks_positions:
        kept = observed.kept.get(layer.index)
        total += POSITION_BYTES * (
            rows * held.tokens if kept is None else sum(kept) + layer.kv_heads * held.appended
        )
    if stack.selection is not None:
        total += stack.selection.index_bytes(held.tokens, layer)
    return total


def _taken_over(stack: MethodStack, layer: LayerShape, tokens: int, observed: Observed) -> int:
    """Bytes of a layer that holds only what it took over."""
    if not tokens:
        return 0
    total = sum(_planes(stack, layer, History(tokens), role, observed) for role in ROLES)
    return total + (POSITION_BYTES * tokens if stack.tracks_positions else 0)


def _planes(
    stack: MethodStack, layer: LayerShape, held: History, role: Role, observed: Observed
) -> int:
    facts = observed.facts.get((layer.index, role))
    kept = observed.kept.get(layer.index)
    if kept is None:
        return stack.plane_bytes(layer.plane(role), held, facts)
    one = layer.plane(role, 1)
    return sum(stack.plane_bytes(one, History(count, held.appended), facts) for count in kept)


def _read(stack: MethodStack, layer: LayerShape, now: History, observed: Observed) -> int:
    if now.appended == 0:
        return 0
    before = stack.held(History(now.at_once, now.appended - 1), layer)
    held = History(before.at_once, before.appended + 1)
    selection = stack.selection
    if selection is not None:
        wanted = selection.selected_tokens(held.tokens, layer)
        if wanted < held.tokens:
            read = sum(
                stack.selected_bytes(
                    layer.plane(role), held, wanted, observed.facts.get((layer.index, role))
                )
                for role in ROLES
            )
            return read + selection.index_bytes(held.tokens, layer)
    return sum(
        _planes(stack, layer, held, role, observed)
        + stack.borrowed_bytes(layer.plane(role), held, observed.facts.get((layer.index, role)))
        for role in ROLES
    )


def _passing(stack: MethodStack, layer: LayerShape, seen: History, observed: Observed) -> int:
    held = stack.held(seen, layer)
    return sum(
        stack.passing_bytes(layer.plane(role), held, _planes(stack, layer, held, role, observed))
        for role in ROLES
    )


def _constants(stack: MethodStack, layers: Sequence[LayerShape]) -> int:
    planes = [layer.plane(role) for layer in layers for role in ROLES]
    total = 0
    for store in stack.stores:
        total += store.constants_bytes(planes)
        inside = [store.inner_shape(plane) for plane in planes]
        planes = [plane for plane in inside if plane is not None]
    return total
