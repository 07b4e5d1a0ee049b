"""Whether a trial is hopeless while its load still runs: a race with the best one so far.

All trials of a search replay the same requests in the same order, so two of them can be compared
when equally many requests have ended. A trial is given up when it is behind by more than noise can
explain, twice in a row, or when the rest of its load could not save it. Where loads are raised
until limits are missed, a run is over once one surely is. Pure: records in, a reason out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

from kvtune.profilers.goal import slo_text
from kvtune.profilers.metrics.goodput import exceeds, is_good
from kvtune.types import Goal, RequestRecord, Slo

CHECKPOINTS = (0.3, 0.45, 0.6, 0.8)
"""Shares of the requests at which a trial is compared."""

LEAST_REQUESTS = 12
"""That have ended before anything is said of a trial. Nor before as many have as are in flight: the
first ones end together where all of them fit, and one by one where they do not."""

NOISE = 0.08
"""Standard deviation of the ratio of two whole runs of one configuration, in natural logs: runs
apart by minutes on a machine that drifts, so more than repeats at once show."""

SIGMAS = 2.33
"""One in a hundred trials that are as good as the best looks worse than this at one checkpoint."""

TIE = 0.97
"""A trial that may reach this share of the best is not hopeless."""

OUT_OF_REACH = 0.8
"""A trial is given up at once when it cannot reach this share even if it serves the rest at once.
Not nearer to 1: of pairs of runs of one configuration within 15 minutes, on a shared machine, the
later one fell short of 0.9 of the earlier in one pair of eight, and of 0.8 in none of 414."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How the run of a trial went: `ended_s[n]` is when request n + 1 of it ended.

    `gained[n]` is what the objective counts (good requests, or output tokens) by then, `worth` what
    each request counts at most, by its index. `in_flight` is the most requests there were at once.
    """

    trial: int
    ended_s: tuple[float, ...]
    gained: tuple[float, ...]
    worth: dict[int, float]
    in_flight: int

    @property
    def rate(self) -> float:
        """The objective of the whole run, a second."""
        return self.gained[-1] / self.ended_s[-1]


def pace_of(trial: int, repeats: Sequence[Sequence[RequestRecord]], goal: Goal) -> Pace | None:
    """The mean pace over the repeats of a trial; `None` where it served nothing that counts."""
    runs = [sorted(records, key=lambda record: record.end_s) for records in repeats if records]
    if not runs:
        return None
    counts = range(min(map(len, runs)))
    gains = [list(accumulate(gain_of(record, goal) for record in run)) for run in runs]
    worth = {
        record.index: 1.0
        if goal.objective == "goodput"
        else float(max(record.output_tokens, record.requested_output_tokens or 0))
        for run in runs
        for record in run
    }
    found = Pace(
        trial=trial,
        ended_s=tuple(fmean(run[n].end_s for run in runs) for n in counts),
        gained=tuple(fmean(gained[n] for gained in gains) for n in counts),
        worth=worth,
        in_flight=max(map(_most_in_flight, runs)),
    )
    return found if found.gained[-1] > 0 and found.ended_s[-1] > 0 else None


def gain_of(record: RequestRecord, goal: Goal) -> float:
    """What a request counts for the objective: it was good, or its output tokens."""
    if goal.objective == "goodput":
        return float(is_good(record, goal))
    return float(record.output_tokens) if record.ok else 0.0


@dataclass(slots=True)
class Race:
    """One run beside the `best` so far; the load client asks it, see `client.Watch`."""

    best: Pace
    goal: Goal
    noise: float = NOISE
    ended: int = field(init=False, default=0)
    reason: str | None = field(init=False, default=None)
    _gained: float = field(init=False, default=0.0)
    _left: float = field(init=False)
    _behind: int = field(init=False, default=0)
    _checkpoints: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        total = len(self.best.ended_s)
        least = max(LEAST_REQUESTS, self.best.in_flight)
        counts = (math.ceil(share * total) for share in CHECKPOINTS)
        self._checkpoints = frozenset(count for count in counts if count >= least)
        self._left = sum(self.best.worth.values())

    @property
    def share(self) -> float:
        """The part of the requests that have ended."""
        return min(1.0, self.ended / len(self.best.ended_s))

    def saw(self, record: RequestRecord) -> None:
        """Note that a request of the run ended, failed or not; in the order in which they do."""
        self.ended += 1
        self._gained += gain_of(record, self.goal)
        self._left -= self.best.worth.get(record.index, 0.0)
        if self.reason is None and self.ended in self._checkpoints:
            self._compare(record.end_s)

    def verdict(self, elapsed_s: float) -> str | None:
        """Why the run is to be ended now; `None` if it is to go on."""
        if self.reason is None and self.share < 1 and elapsed_s > 0:
            most = (self._gained + self._left) / elapsed_s / self.best.rate
            if most < OUT_OF_REACH:
                self.reason = self._said(most)
        return self.reason

    def _compare(self, now_s: float) -> None:
        """Whether it is behind at this checkpoint, and was at the one before."""
        at = self.ended - 1
        theirs = self.best.gained[at] / self.best.ended_s[at]
        if theirs <= 0 or now_s <= 0:
            return
        doubt = math.exp(SIGMAS * self.noise / math.sqrt(self.share))
        lucky = self._gained / now_s / theirs * doubt
        self._behind = self._behind + 1 if lucky < TIE else 0
        if self._behind == 2:
            self.reason = self._said(lucky)

    def _said(self, most: float) -> str:
        seen = f"cut after {self.share:.0%} of its requests"
        return f"{seen}: at most {most:.2f}x of trial {self.best.trial}"


@dataclass(slots=True)
class Missed:
    """Ends a run once it misses a limit whatever becomes of the rest; the load client asks it.

    So it is where more of `requests` were too late than a percentile leaves out. Limits on gaps
    between tokens are left alone: how many gaps there will be is not known.
    """

    goal: Goal
    requests: int
    reason: str | None = field(init=False, default=None)
    _late: dict[str, int] = field(init=False, default_factory=dict)

    def saw(self, record: RequestRecord) -> None:
        """Note that a request of the run ended."""
        for slo in self.goal.slos if record.ok and self.reason is None else ():
            if slo.metric == "itl" or slo.statistic == "mean":
                continue
            late = self._late.get(text := slo_text(slo), 0) + exceeds(record, slo)
            self._late[text] = late
            if late >= self.requests - math.floor((self.requests - 1) * _quantile(slo)):
                self.reason = f"{text} is missed whatever becomes of the rest"

    def verdict(self, elapsed_s: float) -> str | None:
        """Why the run is to be ended now; `None` if it is to go on."""
        return self.reason


def _quantile(slo: Slo) -> float:
    return 1.0 if slo.statistic == "max" else float(slo.statistic.removeprefix("p")) / 100


def _most_in_flight(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way at once."""
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.end_s, -1) for record in records]
    return max(accumulate(change for _, change in sorted(changes)))
