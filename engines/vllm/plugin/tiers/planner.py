"""The engine process's side: what to keep and what to bring back, step by step.

Names of files are `<identity>-<hash of all tokens up to the page's end>`.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.tiers import files
from kvtune.engines.vllm.plugin.tiers.placement import Load, Placement, Store
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import TiersConfig
from kvtune.policies.tiering import Tier

_log = logging.getLogger("vllm.kvtune")

ASK_AGAIN_S = 1.0
"""How often a server looks whether the one that has its folder has ended."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the worker is to move in one step: `loads` by request."""

    loads: dict[str, list[Load]]
    stores: list[Store]
    dropped: list[str]


def slots_of(asked: TiersConfig, row_bytes: int) -> int:
    """How many pages host memory holds.

    Raises:
        BadInput: it holds none.
    """
    slots = asked.host_bytes // row_bytes
    if slots < 1:
        raise BadInput(
            f"tiers.host_bytes of {asked.host_bytes} hold no page, which takes {row_bytes} bytes",
            fix=f"set tiers.host_bytes to many times {row_bytes}, or take tiers out",
        )
    return slots


class Planner:
    """Plans for pages of `block_tokens` tokens and `row_bytes` bytes over all layers.

    Raises:
        BadInput: host memory holds no page.
        OSError: the folder cannot be listed.
    """

    def __init__(
        self, asked: TiersConfig, identity: str, block_tokens: int, row_bytes: int
    ) -> None:
        self._prefix = f"{identity}-"
        self._folder = Path(asked.disk_path)
        self._disk_bytes = asked.disk_bytes
        self._block_tokens = block_tokens
        self._row_bytes = row_bytes
        self._places = Placement(slots_of(asked, row_bytes))
        self._lock: int | None = None
        self._tried_s = 0.0
        self._waits = False
        if asked.disk_bytes:
            self._take_folder()
        if self._waits:
            _log.warning(
                "Another server keeps pages in %s: until it ends, this one keeps none on disk.",
                self._folder,
            )
        self._loads: dict[str, list[Load]] = {}
        self._in_flight: dict[str, list[Load]] = {}

    def name(self, block_hash: bytes) -> str:
        """The name of the page whose tokens have this hash."""
        return f"{self._prefix}{block_hash.hex()}"

    def loadable_tokens(self, hashes: Sequence[bytes]) -> int:
        """How many tokens of the pages with these hashes, from the first on, can be loaded."""
        self._take_over()
        found = self._places.found(self.name(each) for each in hashes)
        return len(found) * self._block_tokens

    def load(self, request_id: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Bring pages back for a request, with the step that is being planned."""
        loads = self._places.load([self.name(each) for each in hashes], block_ids)
        self._loads[request_id] = self._in_flight[request_id] = loads

    def tokens_by_tier(self, request_id: str) -> dict[Tier, int]:
        """Where what a request waits for comes from."""
        tiers: Counter[Tier] = Counter()
        for load in self._in_flight.get(request_id, ()):
            tiers["disk" if load.reads_file else "host"] += self._block_tokens
        return dict(tiers)

    def step(self, computed: Sequence[tuple[bytes, int]]) -> Step:
        """The plan of a step that computes, or reuses, pages with these hashes and block ids."""
        self._take_over()
        # If host memory is tiny, pages of one step push each other out: the last one stays.
        by_slot: dict[int, Store] = {}
        for block_hash, block_id in computed:
            store = self._places.store(self.name(block_hash), block_id)
            if store is not None:
                by_slot[store.slot] = store
        loads, self._loads = self._loads, {}
        self._tell()
        return Step(loads, list(by_slot.values()), self._places.take_dropped())

    def loaded(self, request_id: str, lost: Sequence[str]) -> None:
        """Note that a request's pages are there, except those `lost`."""
        self._places.loaded(self._in_flight.pop(request_id), lost)

    def written(self, name: str, *, is_there: bool) -> None:
        """Note that the writing of a file ended, and whether it is there."""
        self._places.written(name, is_there=is_there)

    def forget(self) -> None:
        """Forget every page of this server, on disk too.

        Further pages are for this server alone: who resets may have put in other weights than those
        that the identity was made of.
        """
        self._places.forget(self._prefix)
        # At once: a server at rest has no next step, and may end before there is one.
        for name in self._places.take_dropped():
            try:
                files.remove(self._folder, name)
            except OSError:
                self._places.dropped.append(name)  # The worker will try again, and say why not.
        self._prefix = f"{secrets.token_hex(8)}-"

    def close(self) -> None:
        """Let others have the folder."""
        self._waits = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_over(self) -> None:
        """Keep files from now on if the server that had the folder has ended."""
        if not self._waits or time.monotonic() < self._tried_s + ASK_AGAIN_S:
            return
        try:
            self._take_folder()
        except OSError as error:
            self.close()
            _log.warning("Pages are not kept on disk, as their folder cannot be used: %s", error)

    def _take_folder(self) -> None:
        """Keep files if the folder is to be had, beside those that are there.

        Raises:
            OSError: it cannot be written to or listed.
        """
        self._tried_s = time.monotonic()
        self._lock = files.lock(self._folder)
        self._waits = self._lock is None
        if not self._waits:
            file_bytes, kept = files.file_bytes(self._row_bytes), files.kept(self._folder)
            self._places.use_disk(self._disk_bytes, file_bytes, kept)

    def _tell(self) -> None:
        host, disk = self._places.host, self._places.disk
        skipped = self._places.take_skipped()
        counters().add("tier_failures", skipped, tier="host", direction="store")
        counters().set("tier_held_bytes", host.used * self._row_bytes, tier="host")
        counters().set("tier_held_bytes", disk.used, tier="disk")
