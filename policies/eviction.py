"""Running choices of tokens: what a `TokenMethod` or a `SelectionMethod` builds.

After every attention of a layer the engine shows an `Evictor` what happened (`Seen`), and asks it
at the end of the prompt and after every generated token which tokens to keep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from kvtune.errors import BadInput
from kvtune.lazy import lazy_import
from kvtune.policies.method import LayerShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvtune.kernels import scores as score_kernels
    from kvtune.kernels import topk
else:
    torch = lazy_import("torch")
    topk = lazy_import("kvtune.kernels.topk")
    score_kernels = lazy_import("kvtune.kernels.scores")

BLOCK_QUERIES = 256
"""Queries whose attention weights are held at once, so that memory grows with the prompt only."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, end) of a sequence, what they are, and whether they must be kept."""

    start: int
    end: int
    label: str = ""
    protected: bool = False


@dataclass(frozen=True, slots=True)
class EvictorContext:
    """What a choice of tokens may ask about.

    `sequence` is a dictionary that all layers of one sequence share, for methods whose layers
    depend on each other.
    """

    shape: LayerShape
    scale: float
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    spans: tuple[Span, ...] = ()
    sequence: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """One attention of one layer of one sequence.

    queries [Hq, m, d] at positions [m] attended to keys and values [Hk, n, d] at positions [S, n]
    (S is 1 when all heads hold the same tokens, else Hk; ascending), which include those of the
    queries themselves. All after RoPE, at original positions.
    """

    queries: Tensor
    query_positions: Tensor
    keys: Tensor
    values: Tensor
    key_positions: Tensor
    ctx: EvictorContext

    def probabilities(self, *, within_spans: bool = False) -> Tensor:
        """Attention weights [Hk, g, m, n] in float32; 0 for keys after the query.

        `within_spans`: each span as if it stood alone, and the tokens outside of all spans too; a
        query sees only the keys of its own.
        """
        visible = self.key_positions[:, None, None, :] <= self.query_positions[:, None]
        if within_spans and self.ctx.spans:
            asking = span_owners(self.query_positions, self.ctx.spans)
            held = span_owners(self.key_positions, self.ctx.spans)
            visible &= held[:, None, None, :] == asking[:, None]
        return score_kernels.attention_probs(
            self.queries, self.keys, self.ctx.scale, mask=visible, softcap=self.ctx.softcap
        )

    def attention_received(self, *, within_spans: bool = False) -> Tensor:
        """Attention that each key got, summed over the queries: [Hk, g, n] in float32.

        It adds up over the chunks of a prompt. `within_spans` as in `probabilities`.
        """
        blocks = (block.probabilities(within_spans=within_spans) for block in self._blocks())
        return reduce(torch.add, (block.sum(-2) for block in blocks))

    def greatest_attention(self) -> Tensor:
        """The most that any query of any head of the group gave each key: [Hk, n] in float32."""
        return reduce(
            torch.maximum, (block.probabilities().amax((1, 2)) for block in self._blocks())
        )

    def protected(self) -> Tensor:
        """Which cached tokens lie in protected spans: bool [S, n]."""
        mask = torch.zeros_like(self.key_positions, dtype=torch.bool)
        for span in self.ctx.spans:
            if span.protected:
                mask |= (self.key_positions >= span.start) & (self.key_positions < span.end)
        return mask

    def _blocks(self) -> Iterator[Seen]:
        """The same attention, a few queries at a time."""
        for start in range(0, self.queries.shape[1], BLOCK_QUERIES):
            block = slice(start, start + BLOCK_QUERIES)
            yield replace(
                self,
                queries=self.queries[:, block],
                query_positions=self.query_positions[block],
            )


class Evictor(ABC):
    """Watches one layer of one sequence and chooses which of its tokens survive."""

    @abstractmethod
    def observe(self, seen: Seen, phase: Literal["prefill", "decode", "scoring"]) -> None:
        """Learn from one attention: a chunk of the prompt, or one or more generated tokens.

        During the prompt nothing is dropped yet: `seen` holds every earlier token. In a scoring
        pass (of a method whose scope is the sequence) the queries are those of extra text that is
        not part of the sequence.
        """

    @abstractmethod
    def select(self, seen: Seen, phase: Literal["prefill", "decode"]) -> Tensor | None:
        """Return the tokens to keep: indices [1 or Hk, m] into the n cached ones, ascending.

        `seen` is the latest attention, the last chunk's of the prompt or the token's. None keeps
        all. One index row means the same for all heads.
        """

    def survived(self, index: Tensor) -> None:  # noqa: B027 - those without scores need nothing
        """Follow an eviction in the own scores; `index` is what `select` returned."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that it keeps between steps, by name."""
        return {}

    def scratch(self) -> dict[str, Tensor]:
        """The score tensors of the latest `select`; then forget them.

        Those at the prompt's end count for the peak.
        """
        return {}


class Selector(ABC):
    """Chooses which cached tokens a decode step of one layer reads."""

    @abstractmethod
    def append(self, keys: Tensor, unchanged_tokens: int) -> None:
        """Follow an append: all keys [Hk, n, d] as they read back from the store now.

        Only the first `unchanged_tokens` are sure to read as they did at the last call.
        """

    @abstractmethod
    def rebuild(self, keys: Tensor) -> None:
        """Follow an eviction: all keys [Hk, n, d] that are left."""

    @abstractmethod
    def choose(self, queries: Tensor, tokens: int) -> Tensor | None:
        """Return what to read for queries [Hq, d] among `tokens` tokens: [Hk, m]; None: all."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The summaries to choose by."""


def choose_tokens(
    scores: Tensor,
    budget_tokens: int,
    *,
    forced: Tensor | None = None,
    positions: Tensor | None = None,
    spans: Sequence[Span] = (),
    fairness: Literal["none", "proportional"] = "none",
) -> Tensor:
    """Return the `budget_tokens` best tokens of each row: ascending indices [S, budget].

    scores [S, n]: higher is better, NaN is worst; ties go to the lower index. `forced` (bool
    [1 or S, n]) tokens are always among them, and count. With proportional fairness the budget is
    split over the spans, and the tokens outside of all spans as one more, in proportion to how many
    of their tokens are there (fair eviction of "Pitfalls of KV cache compression", arXiv
    2510.00231); `positions` [1 or S, n] say which those are.

    Raises:
        BadInput: more tokens are forced than the budget holds.
        ValueError: fairness among spans without positions.
    """
    budget = min(budget_tokens, scores.shape[-1])
    # Infinite scores become the largest finite ones: only what is forced ranks above.
    ranked = scores.float().nan_to_num(nan=float("-inf"))
    if forced is not None:
        most = int(forced.sum(-1).max())
        if most > budget:
            raise BadInput(
                f"{most} tokens must be kept (protected spans, sinks, recent ones), and the budget "
                f"is {budget}",
                fix="raise the budget, or protect less",
            )
        ranked = ranked.masked_fill(forced, float("inf"))
    if fairness == "none" or not spans:
        return topk.top_indices(ranked, budget)
    if positions is None:
        raise ValueError("fairness among spans needs the positions of the tokens")
    rows = zip(ranked, positions.expand(len(ranked), -1), strict=True)
    return torch.stack([_fair_row(row, budget, held_at, spans) for row, held_at in rows])


def split_budget(budget: int, counts: Sequence[int], floors: Sequence[int]) -> list[int]:
    """Split a budget in proportion to `counts`, each at least its floor and at most its count.

    Rounding is repaired by largest remainder, ties to the earlier; the parts sum to the budget.

    Raises:
        ValueError: the floors exceed the budget, or the counts do not reach it.
    """
    if sum(floors) > budget or sum(counts) < budget:
        raise ValueError(f"a budget of {budget} cannot be split over {counts} with floors {floors}")
    total = sum(counts)
    exact = [budget * count / total for count in counts]
    parts = [max(int(share), floor) for share, floor in zip(exact, floors, strict=True)]
    order = sorted(range(len(counts)), key=lambda i: (int(exact[i]) - exact[i], i))
    while sum(parts) < budget:
        room = [i for i in order if parts[i] < counts[i]]
        for i in room[: budget - sum(parts)]:
            parts[i] += 1
    while sum(parts) > budget:
        over = max(
            (i for i in range(len(parts)) if parts[i] > floors[i]),
            key=lambda i: (parts[i] - exact[i], -i),
        )
        parts[over] -= 1
    return parts


def _fair_row(ranked: Tensor, budget: int, positions: Tensor, spans: Sequence[Span]) -> Tensor:
    members = span_members(positions, spans)
    floors = [int((ranked[part] == float("inf")).sum()) for part in members]
    parts = split_budget(budget, [len(part) for part in members], floors)
    kept = [
        part[topk.top_indices(ranked[part], share)]
        for part, share in zip(members, parts, strict=True)
        if share
    ]
    return torch.cat(kept).sort().values


def span_owners(positions: Tensor, spans: Sequence[Span]) -> Tensor:
    """The number of the first span that covers each position; `len(spans)` where none does."""
    owner = torch.full_like(positions, len(spans))
    for number, span in reversed(list(enumerate(spans))):
        owner[(positions >= span.start) & (positions < span.end)] = number
    return owner


def span_members(positions: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    """Indices of the tokens [n] of each span (see `span_owners`), then of all others.

    Spans without a token here are left out.
    """
    owner = span_owners(positions, spans)
    return [
        members
        for number in range(len(spans) + 1)
        if len(members := (owner == number).nonzero().squeeze(-1))
    ]
