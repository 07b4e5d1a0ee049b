"""The plan of a confirmation: when its rounds are looked at, and what each look may be wrong by.

All looks together call a finalist better that is not with a chance of at most `ALPHA`. It is
divided among the looks in proportion to their rounds (Bonferroni, so it holds whatever they have in
common); a confirmation that ends early for want of time spends at its end what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LOOKS = (3, 5, 8)
USUAL = 5
"""Simulated studies take 4.6 rounds without a winner, and fewer with a clear one."""

ALPHA = 0.025
"""One-sided, so that the bounds of a single look at a single finalist are those of a 95% interval.
A false winner may be named in 5% of all searches; half of that leaves room for noise that is not as
it should be."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Confirming:
    """A confirmation between two of its measurements, in round `number` of at most `most`.

    `values` maps a trial to the mean of its objective so far. All that is left takes about `left_s`
    as a rule, without questions; `asked_s` is what questions took until now.
    """

    number: int
    most: int
    values: Mapping[int, float]
    left_s: float
    asked_s: float = 0.0


def looks(most: int) -> tuple[int, ...]:
    """After which rounds they are looked at, where there are at most so many."""
    return (*(look for look in LOOKS if look < most), most)


def usual(most: int) -> int:
    """How many rounds a confirmation takes as a rule, where there are at most so many."""
    return min(most, USUAL)


def next_look(number: int, most: int) -> int:
    """After how many rounds they are looked at next, once `number` are over."""
    return next(look for look in looks(most) if look > number)


def rounds_left(number: int, most: int) -> int:
    """How many more there are as a rule once `number` are over, and there is a next one."""
    return max(usual(most), next_look(number, most)) - number


def level_at(look: int, most: int) -> float:
    """What a planned look may be wrong by."""
    return ALPHA * look / sum(looks(most))


def level_left(rounds: int, most: int) -> float:
    """What the last look may be wrong by, if the rounds end here."""
    return ALPHA - sum(level_at(look, most) for look in looks(most) if look < rounds)


def turned(items: Sequence[T], number: int) -> list[T]:
    """The order of round `number`, from 0: each is first, second, and so on in turn."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]
