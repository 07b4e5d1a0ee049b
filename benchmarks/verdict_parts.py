"""What the regimes of the labelled suite are made of: loads, arms, and the truth about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from kvtune.types import Bottleneck, Request

PREFIX_BLOCK_TOKENS = 16

Effect = Literal["helps", "hurts", "changes nothing"]
Expected = Literal["helps", "hurts", "changes nothing", "does not help", "open"]
ModelName = Literal["smollm2", "keys", "deep keys", "wide", "half", "tiny"]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind. The k-th begins with prefix k modulo `prefixes`, if there are any.

    `concurrency` requests are kept in flight; `None`: they arrive at `rate_per_s`.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate_per_s: float = 0.0
    prefixes: int = 0
    prefix_tokens: int = 0
    uneven: bool = False

    def make(self) -> tuple[Request, ...]:
        """The requests; their tokens are drawn when they are sent."""
        return tuple(self._request(number) for number in range(self.requests))

    def _request(self, number: int) -> Request:
        # A fixed cycle of short and long, so that every run sends the same lengths.
        share = (1.0, 0.25, 1.75, 0.5, 1.5)[number % 5] if self.uneven else 1.0
        blocks: tuple[int, ...] = ()
        if self.prefixes:
            first = (number % self.prefixes) << 16
            blocks = tuple(range(first, first + self.prefix_tokens // PREFIX_BLOCK_TOKENS))
        return Request(
            arrival_s=None if self.concurrency else number / self.rate_per_s,
            input_tokens=self.prefix_tokens + int(self.prompt_tokens * share),
            output_tokens=max(1, int(self.output_tokens * share)),
            prefix_blocks=blocks,
            prefix_block_tokens=PREFIX_BLOCK_TOKENS if blocks else 0,
        )


@dataclass(frozen=True, slots=True)
class Arm:
    """One change of the baseline: engine arguments on top of its own, another load or model.

    `expected` is what the truth says that it does to goodput; "does not help" leaves open whether
    it hurts, and "open" everything. `removed` are arguments that the baseline has and the arm has
    not.
    """

    name: str
    expected: Expected
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    load: Load | None = None
    model: ModelName | None = None

    @property
    def is_engine(self) -> bool:
        """Whether it is a lever of the engine, for which there may be a forecast."""
        return self.load is None and self.model is None

    def on(self, base: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """The engine arguments of the arm."""
        kept = {name: value for name, value in base.items() if name not in self.removed}
        return {**kept, **self.arguments}


@dataclass(frozen=True, slots=True)
class Regime:
    """A load on an engine. `truth` is the bottleneck, or the largest two where no one is it."""

    name: str
    truth: tuple[Bottleneck, ...]
    built: str
    load: Load
    arguments: Mapping[str, JsonValue]
    arms: Sequence[Arm]
    model: ModelName = "smollm2"
    goal: str = "max goodput"
