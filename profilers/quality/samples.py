"""Negative samples: items that were fine with the baseline and are broken now, both texts shown."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.profilers.quality.canary import broken_output
from kvtune.profilers.quality.figures import Row
from kvtune.profilers.quality.limits import ANY
from kvtune.profilers.quality.suite import Answer, Item, Suite
from kvtune.types import NegativeSample

MOST_PER_CATEGORY = 5

HEAD_CHARACTERS = 300
TAIL_CHARACTERS = 500
"""How much of a long prompt is shown: where it starts, and more of where it asks."""


class NegativeSamples:
    """Collects broken items and picks the most telling ones of each category."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[float, bool, NegativeSample]]] = {}

    def add(
        self, suite: Suite, item: Item, rows: Sequence[Row], ours: Answer, theirs: Answer
    ) -> None:
        """Take an item that broke by any of its `rows`; others are left out."""
        broken = [row for row in rows if row.broke]
        if not broken:
            return
        worst = min(broken, key=lambda row: (row.suite == ANY, row.gain))
        reasons = [reason for text in ours.texts if (reason := broken_output(text)) is not None]
        failed = None if ours.error is None else f"no answer: {ours.error}"
        details = [failed or suite.detail(item, ours), *reasons[:1]]
        if not worst.headline:
            details.insert(0, worst.metric.name)
        self._found.setdefault((suite.name, item.category), []).append(
            (
                worst.gain,
                not reasons and failed is None,
                NegativeSample(
                    suite=suite.name,
                    category=item.category,
                    item=item.key,
                    asked=_shortened(_asked(item)),
                    candidate=_said(ours),
                    baseline=_said(theirs),
                    detail="; ".join(filter(None, details)),
                ),
            )
        )

    def told(self) -> tuple[NegativeSample, ...]:
        """At most five of each category: the largest drops first, then degenerate texts."""
        return tuple(
            sample
            for found in self._found.values()
            for *_, sample in sorted(found, key=lambda each: each[:2])[:MOST_PER_CATEGORY]
        )

    def untold(self) -> tuple[str, ...]:
        """How many more there are, for each category that has too many to tell."""
        return tuple(
            f"{suite}/{category}: {len(found) - MOST_PER_CATEGORY} more broken items not listed"
            for (suite, category), found in self._found.items()
            if len(found) > MOST_PER_CATEGORY
        )


def _asked(item: Item) -> str:
    turns = [f"{turn['role']}: {turn['content']}" for turn in item.messages or ()]
    return "\n".join(
        [*turns, *filter(None, [item.prompt]), *(f"user: {turn}" for turn in item.follow_ups)]
    )


def _said(answer: Answer) -> str:
    return "\n---\n".join(answer.texts)


def _shortened(text: str) -> str:
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]} [...] {text[-TAIL_CHARACTERS:]}"
