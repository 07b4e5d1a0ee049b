"""The contract of a quality suite: items to ask, and what their answers are worth.

A suite is one new file in `kvtune.profilers.quality.suites` (or an entry point of the group
`kvtune.quality`) with a concrete subclass of `Suite`. Items are generated from a seed, so the same
ones are asked of every configuration, and configurations are compared item by item. Suites ask no
model themselves: an `Asker` (a server, the reference engine) does. `figures` is pure, and what only
somebody else can tell of an answer, a judge say, is added to it before, by `settle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol

from kvtune.registry import discover

LIMITS_OF_SPREAD = 5
"""The spread of a metric of which nothing is known, in limits."""

PACKAGE = "kvtune.profilers.quality.suites"
GROUP = "kvtune.quality"


class Size(StrEnum):
    """How much is asked: a screen of seconds, a standard run of minutes, or as much as pays."""

    SCREEN = "screen"
    STANDARD = "standard"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """What decides a suite's items.

    `max_tokens` bounds prompt and answers of an item together (the model's context), and
    `per_category` overrides how many items of each category the size would give. `workload` holds
    prompts of the user's own traffic, `data` a file of theirs, for the suites that take them.
    `protects` says that who is asked keeps the `protected` parts of an item, as evictors of the
    reference engine do; elsewhere items that differ by nothing else would be asked twice.
    """

    size: Size = Size.STANDARD
    seed: int = 0
    max_tokens: int | None = None
    per_category: int | None = None
    workload: tuple[str, ...] = ()
    data: str | None = None
    protects: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to ask.

    `messages` is a chat that ends with the user's turn (roles system, user, assistant), `prompt` a
    text to continue; exactly one is set. `follow_ups` are user turns that are asked one after the
    other, after the model's own answers, on the same cache. `scored` is a text whose tokens are
    given and scored instead of generated; nothing is asked then. `place` puts the item on the axes
    of a map (`length_tokens`, `depth`, `turns`). `protected` are parts of the prompt that an
    evictor is told to keep, as a server is told by its configuration. `about` names the text that
    items of other categories ask about too; without it an item shares nothing. `check` is what the
    suite's own checker has to know (an expected value, a rule's parameters), as JSON would hold it;
    no model sees it.
    """

    key: str
    category: str
    messages: tuple[Mapping[str, str], ...] | None = None
    prompt: str | None = None
    scored: str | None = None
    follow_ups: tuple[str, ...] = ()
    output_tokens: int = 64
    temperature: float = 0.0
    place: Mapping[str, float] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    about: str = ""
    check: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model thought of the tokens of a text, each given all before it.

    `token_ids[i]` had log probability `logprobs[i]`; `top[i]` maps the most likely ids there to
    their log probabilities (natural logarithms). The first token of a text has no score and is
    left out.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for an item: a text a turn, and how each ended.

    `output_tokens` counts each turn's tokens; `finish_reasons` are the engine's ("stop",
    "length"). `scores` is set for items with a `scored` text. `verdict` is what a judge found the
    answer worth, from 0 to 1, where the suite asks one (`Suite.settle`). `error` says why there is
    no answer; the rest is then empty.
    """

    texts: tuple[str, ...] = ()
    output_tokens: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    scores: TokenScores | None = None
    verdict: float | None = None
    error: str | None = None


class Asker(Protocol):
    """Something that answers items: a server, or the reference engine under a stack."""

    async def ask(self, items: Sequence[Item], *, seed: int, concurrency: int) -> list[Answer]:
        """Answer every item, in their order; `seed` is for items with a temperature.

        A failed item is an `Answer` with an error, never an exception.
        """


@dataclass(frozen=True, slots=True)
class QualityMetric:
    """A figure of items. `limit` is the default margin, in the metric's own unit.

    A `difference` is judged by candidate minus baseline, on the same items: at least -limit where
    higher is better, at most limit where lower is. A `level` already compares the two (a
    divergence): its mean is at most the limit where lower is better, at least where higher is.
    Shares (0 to 1) have the unit "share" and are shown in points. `bounds` are those of one item;
    `None` where there are none, or where an item is itself a mean of so many that it lies near the
    others. `spread` says then how far from them a changed item usually lies; without, five limits
    are assumed, so that fewer than 13 equal items prove nothing. A metric that `decides` counts
    without being named by a limit, as a suite's first one and levels do.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    kind: Literal["difference", "level"]
    limit: float
    bounds: tuple[float, float] | None = (0.0, 1.0)
    decides: bool = False
    spread: float | None = None

    @property
    def scale(self) -> float:
        """How far one item may change, in the metric's unit: its range, or `spread`."""
        if self.bounds is not None:
            return self.bounds[1] - self.bounds[0]
        return LIMITS_OF_SPREAD * self.limit if self.spread is None else self.spread


class Suite(ABC):
    """A family of items with checkers. The first of `metrics` is what the suite's name stands for.

    `says` is one line for `--help`: what breaks when this suite fails. `scores` suites have given
    texts scored and ask for no answers.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    metrics: ClassVar[tuple[QualityMetric, ...]]
    scores: ClassVar[bool] = False

    @abstractmethod
    def items(self, plan: SuitePlan) -> tuple[Item, ...]:
        """The items of a plan, the same for the same plan. A larger size extends a smaller one.

        Raises:
            BadInput: the plan's own data cannot be used; the message names the line.
        """

    async def settle(self, items: Sequence[Item], answers: Sequence[Answer]) -> list[Answer]:
        """Add to fresh answers what `figures` has to know and a text does not say: a verdict.

        Called once, before answers are kept. What fails is an `Answer` with an error. Most suites
        have nothing to add.
        """
        return list(answers)

    @abstractmethod
    def figures(
        self, item: Item, ours: Answer, theirs: Answer
    ) -> Mapping[str, tuple[float, float]]:
        """Each metric's (candidate, baseline) values for an item that both answered.

        A metric that the item says nothing about is left out. For a `level`, the baseline's value
        is what it would be if the two were the same.
        """

    def detail(self, item: Item, answer: Answer) -> str:
        """Why an answer is worth what it is, in a few words; empty when there is nothing to say."""
        return ""


def suites() -> dict[str, Suite]:
    """Every suite, by name."""
    return {name: suite() for name, suite in sorted(discover(PACKAGE, Suite, GROUP).items())}
