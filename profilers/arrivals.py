"""How many requests arrive when, counted in one pass and in memory that does not grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtune.errors import BadInput

MOST_BINS = 60
FINEST_S = 2.0**-6
"""Bins begin at this width and double until the whole fits."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in consecutive bins of `bin_s` seconds; the first begins with the first request."""

    bin_s: float
    counts: tuple[int, ...]

    @property
    def rates_per_s(self) -> tuple[float, ...]:
        """Requests a second in each bin. The last bin may be cut short."""
        return tuple(count / self.bin_s for count in self.counts)

    @property
    def starts_s(self) -> tuple[float, ...]:
        """When each bin begins, in seconds after the first request."""
        return tuple(index * self.bin_s for index in range(len(self.counts)))


class ArrivalCounter:
    """Counts arrivals as they come, in order, in at most `MOST_BINS` bins."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._bin_s = FINEST_S
        self._counts: list[int] = []
        self._known = True

    def add(self, arrival_s: float | None) -> None:
        """Count one request; with one whose time is not known nothing is.

        Raises:
            BadInput: it arrives before the first one.
        """
        if arrival_s is None:
            self._known = False
            return
        if self._first_s is None:
            self._first_s = arrival_s
        since_s = arrival_s - self._first_s
        if since_s < 0:
            raise BadInput(
                f"a request arrives {-since_s:g} s before the first one",
                "Sort them by arrival time.",
            )
        while since_s >= MOST_BINS * self._bin_s:
            self._bin_s *= 2
            pairs = range(0, len(self._counts), 2)
            self._counts = [sum(self._counts[index : index + 2]) for index in pairs]
        index = int(since_s / self._bin_s)
        self._counts.extend([0] * (index + 1 - len(self._counts)))
        self._counts[index] += 1

    def result(self) -> Arrivals | None:
        """What was counted; None where a time is missing, or all came at once."""
        if not self._known or len(self._counts) < 2:
            return None
        return Arrivals(self._bin_s, tuple(self._counts))


def arrivals(times_s: Iterable[float | None]) -> Arrivals | None:
    """Count arrivals at `times_s` (in any order, if all are known).

    None where one is not known, or all came within the finest bin.
    """
    counter = ArrivalCounter()
    known = list(times_s)
    for time_s in sorted(time_s for time_s in known if time_s is not None):
        counter.add(time_s)
    if None in known:
        counter.add(None)
    return counter.result()
