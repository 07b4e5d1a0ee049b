"""Which items a plan asks: how many of a category, and only those that fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvtune.profilers.quality.suite import Item, Size, SuitePlan
from kvtune.profilers.quality.texts import most_tokens

TEMPLATE_TOKENS = 12
"""What a chat template may write around a message."""

T = TypeVar("T")


def numbered(plan: SuitePlan, stages: Sequence[tuple[Size, int, T]]) -> Iterator[tuple[int, T]]:
    """The numbers of a plan's items, each with what its stage says of it.

    A stage is a size, up to how many items a category has in it, and what is said of the items
    that it adds; stages go from the smallest size to the largest, so a larger size extends a
    smaller one. `per_category` in place of a size's own number cuts a stage short or lets it go on.
    """
    number = 0
    for size, upto, said in stages:
        last = size is plan.size
        wanted = upto if plan.per_category is None else plan.per_category
        for _ in range(number, wanted if last else min(upto, wanted)):
            yield number, said
            number += 1
        if last:
            return


def fitting(items: Iterable[Item], max_tokens: int | None) -> tuple[Item, ...]:
    """The chats in English that fit a context of `max_tokens`, answers included, for certain."""
    return tuple(item for item in items if max_tokens is None or _most_tokens(item) <= max_tokens)


def _most_tokens(item: Item) -> int:
    texts = [message["content"] for message in item.messages or ()] + list(item.follow_ups)
    answers = (1 + len(item.follow_ups)) * item.output_tokens
    return sum(most_tokens(text) + TEMPLATE_TOKENS for text in texts) + answers
