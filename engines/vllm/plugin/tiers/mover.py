"""The worker's side: moves the bytes that the engine process plans.

Pages go to host memory within the step that computes them, as the next step may reuse them. All
else takes a thread of its own: one loads, one writes files and removes them. Whatever fails is told
and counts as not kept; no failure ends a server, and none is answered with other content: a row of
host memory gives out what it holds under that very name only.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.tiers import files
from kvtune.engines.vllm.plugin.tiers.pages import Pages, host_rows
from kvtune.engines.vllm.plugin.tiers.placement import Load, Store
from kvtune.policies.tiering import Tier

_log = logging.getLogger("vllm.kvtune")
_SAY_AGAIN_S = 60.0
CLOSE_S = 3.0
"""How long a server that ends goes on writing. vLLM kills a worker that takes longer than 5 s."""

Direction = Literal["store", "load"]
T = TypeVar("T")


@dataclass(slots=True)
class Moved:
    """Bytes and seconds by tier and direction, and how often it failed."""

    bytes: defaultdict[tuple[Tier, Direction], int] = field(
        default_factory=lambda: defaultdict(int)
    )
    seconds: defaultdict[tuple[Tier, Direction], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    failures: defaultdict[tuple[Tier, Direction], int] = field(
        default_factory=lambda: defaultdict(int)
    )

    def count(self) -> None:
        """Add it to the figures of this process."""
        for name, amounts in (
            ("tier_bytes", self.bytes),
            ("tier_seconds", self.seconds),
            ("tier_failures", self.failures),
        ):
            for (tier, direction), amount in amounts.items():
                counters().add(name, amount, tier=tier, direction=direction)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A request's pages were brought back, except those of `lost`."""

    request_id: str
    lost: tuple[Load, ...]
    moved: Moved


@dataclass(frozen=True, slots=True)
class Written:
    """A page was written to its file, or could not be."""

    name: str
    is_there: bool
    moved: Moved


class Mover:
    """Host memory of `slots` rows, files in `folder` if any are asked for, and the pages between.

    `store`, `load`, `drop` and `take` are for the thread that runs the model.

    Raises:
        BadInput: there is less memory than that.
    """

    def __init__(self, pages: Pages, slots: int, folder: Path) -> None:
        self._pages = pages
        self._folder = folder
        # The last row is for files whose content has no slot.
        self._rows = host_rows(slots + 1, pages.row_bytes)
        self._names: dict[int, str] = {}
        self._loader: _Lane[Loaded] = _Lane("kvtune-load")
        self._writer: _Lane[Written | None] = _Lane("kvtune-write")

    def store(self, stores: Sequence[Store]) -> None:
        """Keep pages, now; write files of them later. No two stores share a slot."""
        if not stores:
            return
        moved, begin_s = Moved(), time.perf_counter()
        for store in stores:
            self._pages.to_row(store.block_id, self._rows[store.slot])
            self._names[store.slot] = store.name
        moved.seconds["host", "store"] = time.perf_counter() - begin_s
        moved.bytes["host", "store"] = len(stores) * self._pages.row_bytes
        moved.count()
        for store in stores:
            if store.writes_file:
                self._writer.submit(self._write, store)

    def load(self, request_id: str, loads: Sequence[Load]) -> None:
        """Bring pages back, in a while: `take` tells when."""
        self._loader.submit(self._load, request_id, loads)

    def drop(self, names: Sequence[str]) -> None:
        """Remove files, after what is being written."""
        for name in names:
            self._writer.submit(self._remove, name)

    def take(self) -> tuple[list[Loaded], list[Written]]:
        """What ended since this was last asked."""
        loaded = self._loader.take()
        written = [each for each in self._writer.take() if each is not None]
        for moved in (*(each.moved for each in loaded), *(each.moved for each in written)):
            moved.count()
        return loaded, written

    def close(self) -> None:
        """Go on writing for `CLOSE_S` at most; what is not written by then is not kept."""
        self._loader.close(0)
        if left := self._writer.close(CLOSE_S):
            _log.warning("The server ends before %d pages are on disk: they are not kept.", left)

    def _load(self, request_id: str, loads: Sequence[Load]) -> Loaded:
        moved, lost = Moved(), []
        for load in loads:
            slot = len(self._rows) - 1 if load.slot is None else load.slot
            if load.reads_file:
                self._read(load.name, slot, moved)
            if self._names.get(slot) != load.name:
                lost.append(load)
                continue
            begin_s = time.perf_counter()
            self._pages.from_row(self._rows[slot], load.block_id)
            moved.seconds["host", "load"] += time.perf_counter() - begin_s
            moved.bytes["host", "load"] += self._pages.row_bytes
        return Loaded(request_id, tuple(lost), moved)

    def _read(self, name: str, slot: int, moved: Moved) -> None:
        """Fill a row from a file; it has no name if that fails."""
        self._names.pop(slot, None)
        begin_s = time.perf_counter()
        try:
            files.read_into(self._folder, name, self._rows[slot].data)
        except (OSError, files.Damaged) as error:
            moved.failures["disk", "load"] += 1
            _say(f"A page on disk could not be used ({error}): its tokens are computed again.")
            return
        self._names[slot] = name
        moved.seconds["disk", "load"] += time.perf_counter() - begin_s
        moved.bytes["disk", "load"] += self._pages.row_bytes

    def _write(self, store: Store) -> Written:
        moved, begin_s = Moved(), time.perf_counter()
        try:
            files.write(self._folder, store.name, self._rows[store.slot].data)
        except OSError as error:
            moved.failures["disk", "store"] += 1
            _say(f"A page could not be written to disk ({error}): it is not kept there.")
            return Written(store.name, False, moved)
        moved.seconds["disk", "store"] = time.perf_counter() - begin_s
        moved.bytes["disk", "store"] = self._pages.row_bytes
        return Written(store.name, True, moved)

    def _remove(self, name: str) -> None:
        try:
            files.remove(self._folder, name)
        except OSError as error:
            _say(f"A page could not be removed from disk ({error}).")


class _Lane(Generic[T]):
    """Does one thing after another, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._begun: list[Future[T]] = []

    def submit(self, work: Callable[..., T], *given: object) -> None:
        self._begun.append(self._thread.submit(work, *given))

    def take(self) -> list[T]:
        """What ended, in its order; an error that nobody foresaw is raised here."""
        ended = 0
        while ended < len(self._begun) and self._begun[ended].done():
            ended += 1
        done, self._begun = self._begun[:ended], self._begun[ended:]
        return [future.result() for future in done]

    def close(self, most_s: float) -> int:
        """Go on for so many seconds at most; return how much was not done by then."""
        left = wait(self._begun, timeout=most_s).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        return len(left)


_said_s: dict[str, float] = {}


def _say(what: str) -> None:
    """Warn, but of the like once a minute only."""
    kind = what.split("(")[0]
    now_s = time.monotonic()
    if now_s - _said_s.get(kind, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
        _said_s[kind] = now_s
        _log.warning(what)
