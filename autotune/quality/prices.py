"""How long questions will take, by how long others took.

Suites differ: a long prompt takes many times what a short one does. A screen asks all suites at
once and tells only what all of it took, which is divided by how much there is to read and to write.
Finalists are asked suite by suite, so once somebody was asked one, it is known what its items take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Item

if TYPE_CHECKING:
    from kvtune.autotune.quality.answers import Questions

ITEM_S = 0.5
"""What an item is thought to take before any was asked: a small model on two CPU cores, or a large
one on an accelerator, answers two a second or more, `CONCURRENCY` at once."""

OUTPUT_CHARACTERS = 10
"""An output token takes about as long as so many characters of a prompt. With SmolLM2-135M on two
CPU cores (vLLM 0.32) the seven suites of a standard run took 309 s; from what its screen had taken
they are thought to take 304 s this way, each between 0.6 and 1.5 of what it did, and 237 s by the
number of items, fidelity a quarter of what it did."""


def characters(item: Item) -> int:
    """What there is to read and to write of an item, in characters of a prompt."""
    texts = [item.prompt or "", item.scored or "", *item.follow_ups]
    texts += [message["content"] for message in item.messages or ()]
    turns = 0 if item.scored is not None else 1 + len(item.follow_ups)
    return sum(map(len, texts)) + OUTPUT_CHARACTERS * item.output_tokens * turns


@dataclass(slots=True)
class Prices:
    """What items take, as far as it is known: those of screens together, and each suite's own."""

    _screens_s: list[float] = field(init=False, default_factory=list)
    _items_s: dict[str, float] = field(init=False, default_factory=dict)

    def learn_screen(self, wall_s: float) -> None:
        """Take what a screen took."""
        self._screens_s.append(wall_s)

    def learn(self, known: Iterable[Mapping[str, Asked]]) -> None:
        """Take what suites took that were asked alone, from the answers to them, by suite."""
        for name, asked in (each for found in known for each in found.items()):
            items = sum(len(suite.items) for suite in asked.suites)
            if items:
                self._items_s[name] = asked.wall_s / items

    def of_screen_s(self, screen: Questions) -> float:
        """What a screen takes."""
        return median(self._screens_s) if self._screens_s else screen.count * ITEM_S

    def of_s(self, questions: Questions, names: Iterable[str], screen: Questions) -> float:
        """What suites of these questions take, each as often as it is named."""
        pace_s = self.of_screen_s(screen) / max(1, sum(screen.characters.values()))

        def price_s(name: str) -> float:
            if name in self._items_s:
                return self._items_s[name] * questions.counts[name]
            if not self._screens_s:
                return ITEM_S * questions.counts[name]
            return pace_s * questions.characters[name]

        return sum(map(price_s, names))
