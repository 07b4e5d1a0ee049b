"""Follow a server's counters over time: through slow answers, restarts, and to its end.

Counters start anew when a server does. What is judged is therefore one life of it, the longest that
was seen, and never a difference across a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvtune.profilers.scrape import (
    LOAD_GAUGES,
    PREFIX_COUNTERS,
    START,
    Samples,
    Scraper,
    counter_resets,
    counters_delta,
    parse_metrics,
)

_SAMPLED = (*LOAD_GAUGES, *PREFIX_COUNTERS, START)

SLOW_READING_S = 1.0
"""A reading that takes longer is worth a remark: so far apart lie the samples of the gauges."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was read of one life of a server, in seconds since the given start.

    `lost` says why the server could not be read at the end, "" if it could. `is_whole` tells that
    there was no restart and no loss: counters then are of the whole time.
    """

    from_s: float
    to_s: float
    counters: Mapping[str, float]
    gauges: Mapping[str, Sequence[tuple[float, float]]]
    notes: tuple[str, ...]
    lost: str
    is_whole: bool


@dataclass(slots=True)
class _Life:
    """The readings between two restarts: the first page, the last one, and samples in between."""

    first: Samples
    first_s: float
    last_page: str
    last_s: float
    sampled: list[tuple[float, Samples]] = field(default_factory=list)


class Follower:
    """Reads a server's counters when asked, and keeps what each of its lives showed."""

    def __init__(self, scraper: Scraper) -> None:
        self._scraper = scraper
        self._lives: list[_Life] = []
        self._newest: Samples | None = None
        self._starts: list[float] = []
        self._took_s: list[float] = []
        self._restarted_by: str = ""
        self._is_lost = False
        self._comes_back = False
        self.heard_s = time.perf_counter()
        """When the server was read last, by `time.perf_counter`."""

    async def read(self, *, is_sample: bool = False) -> bool:
        """Read the counters once; False if that failed.

        `is_sample` readings tell of the load; a reading before or after it does not.
        """
        began_s = time.perf_counter()
        page = await self._scraper.fetch()
        now_s = time.perf_counter()
        self._is_lost = page is None
        if page is None:
            return False
        self.heard_s = now_s
        self._took_s.append(now_s - began_s)
        samples = parse_metrics(page, _SAMPLED)
        if self._newest is None or self._restarted(self._newest, samples):
            self._lives.append(_Life(parse_metrics(page), now_s, page, now_s))
        life, self._newest = self._lives[-1], samples
        life.last_page, life.last_s = page, now_s
        if is_sample:
            life.sampled.append((now_s, samples))
        return True

    @property
    def quickest_s(self) -> float:
        """How long the quickest reading took; 0 before the first one."""
        return min(self._took_s, default=0.0)

    async def follow(self, interval_s: float) -> None:
        """Take a sample every `interval_s` until cancelled."""
        while True:
            await self.read(is_sample=True)
            await asyncio.sleep(interval_s)

    def seen(self, start_s: float) -> Seen:
        """What the longest life showed; times are counted from `start_s` of `time.perf_counter`.

        Raises:
            ValueError: nothing could be read.
        """
        if not self._lives:
            raise ValueError("the server was never read")
        life = max(self._lives, key=lambda one: one.last_s - one.first_s)
        last = parse_metrics(life.last_page)
        gauges: dict[str, list[tuple[float, float]]] = {}
        for at_s, samples in life.sampled:
            for series, value in (*samples.gauges.items(), *samples.counters.items()):
                if series != START:
                    gauges.setdefault(series, []).append((at_s - start_s, value))
        from_s, to_s = life.first_s - start_s, life.last_s - start_s
        lost = self._lost(self._lives[-1].last_s - start_s)
        notes = [*self._restarts(from_s, to_s), *self._readings(), *([lost] if lost else [])]
        if resets := counter_resets(life.first, last):
            notes.append(f"{len(resets)} counters went back, such as {resets[0]}")
        return Seen(
            from_s=from_s,
            to_s=to_s,
            counters=counters_delta(life.first, last),
            gauges=gauges,
            notes=tuple(notes),
            lost=lost,
            is_whole=len(self._lives) == 1 and not lost,
        )

    def _restarted(self, before: Samples, after: Samples) -> bool:
        start, fell = after.gauges.get(START), counter_resets(before, after)
        is_new = start is not None and START in before.gauges and start != before.gauges[START]
        if not is_new and not fell:
            return False
        if start is not None and before.gauges.get(START) is not None:
            self._starts.append(before.gauges[START])
            self._comes_back |= start in self._starts
        self._restarted_by = self._restarted_by or (fell[0] if fell else START)
        return True

    def _restarts(self, from_s: float, to_s: float) -> list[str]:
        if len(self._lives) == 1:
            return []
        if self._comes_back:
            return [
                "the address leads to several servers in turn, so that no counters go together: "
                "give the address of one of them"
            ]
        times = len(self._lives) - 1
        return [
            f"the server restarted {'once' if times == 1 else f'{times} times'} meanwhile "
            f"(by {self._restarted_by}): counters are those of {max(0.0, from_s):.1f} s to "
            f"{to_s:.1f} s, between restarts"
        ]

    def _readings(self) -> list[str]:
        notes = []
        if problems := self._scraper.problems:
            times = f" ({len(problems)} times)" if len(problems) > 1 else ""
            notes.append(f"the server's counters are incomplete: {problems[0]}{times}")
        if (took_s := median(self._took_s)) > SLOW_READING_S:
            notes.append(f"reading the server's counters took {took_s:.1f} s each time")
        return notes

    def _lost(self, last_s: float) -> str:
        if not self._is_lost:
            return ""
        reason = self._scraper.problems[-1]
        return f"the server could not be read any more after {max(0.0, last_s):.1f} s ({reason})"
