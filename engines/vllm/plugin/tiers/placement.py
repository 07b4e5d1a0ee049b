"""Where kept pages are, and who leaves a full tier. Pure: it moves no byte.

A page is known by the name of its file. Least recently used leaves first; what is being read or
written does not leave.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtune.policies.tiering import Tier


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a page back: from its slot of host memory, or from its file.

    With both, the file's content is also left in the slot.
    """

    name: str
    block_id: int
    slot: int | None
    reads_file: bool


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a computed page in a slot of host memory, and write it to its file if so asked."""

    name: str
    block_id: int
    slot: int
    writes_file: bool


class Shelf:
    """What is in one tier, in the order of use, of at most `capacity` units (slots or bytes)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._held_size = 0
        self._lost: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._sizes and name not in self._lost

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sizes))

    def touch(self, name: str) -> None:
        """Make it the last to leave."""
        self._sizes.move_to_end(name)

    def admit(self, name: str, size: int) -> list[str] | None:
        """Take it in; return who left for it, or `None` if there is no room even so."""
        if name in self._sizes:
            return None  # a lost one that is still being read
        over = self.used + size - self.capacity
        if over > self.used - self._held_size:
            return None
        leaving: list[str] = []
        for other, other_size in self._sizes.items():
            if over <= 0:
                break
            if other not in self._held:
                leaving.append(other)
                over -= other_size
        for other in leaving:
            self._remove(other)
        self._sizes[name] = size
        self.used += size
        return leaving

    def hold(self, name: str) -> None:
        """Keep it from leaving until it is released as often."""
        if name not in self._held:
            self._held_size += self._sizes[name]
        self._held[name] += 1

    def release(self, name: str) -> list[str]:
        """Undo one `hold`; return it if it leaves now because it was lost."""
        self._held[name] -= 1
        if self._held[name]:
            return []
        del self._held[name]
        self._held_size -= self._sizes[name]
        return self._drop_lost(name)

    def lose(self, name: str) -> list[str]:
        """Its content is not there: it is in no longer; return it if it leaves at once."""
        if name not in self._sizes:
            return []
        self._lost.add(name)
        return [] if name in self._held else self._drop_lost(name)

    def _drop_lost(self, name: str) -> list[str]:
        if name not in self._lost:
            return []
        self._remove(name)
        return [name]

    def _remove(self, name: str) -> None:
        self.used -= self._sizes.pop(name)
        self._lost.discard(name)


class Placement:
    """Both tiers of a server, whose pages take a slot of host memory or `file_bytes` on disk.

    There is a disk from `use_disk` on. `dropped` collects the names of files to be removed.
    """

    def __init__(self, slots: int) -> None:
        self.host = Shelf(slots)
        self.disk = Shelf(0)
        self.dropped: list[str] = []
        self._skipped = 0
        self._file_bytes = 0
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(slots))

    def use_disk(
        self, disk_bytes: int, file_bytes: int, on_disk: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Keep files too, beside those `on_disk`: the least recently used first, with sizes."""
        self.disk = Shelf(disk_bytes)
        self._file_bytes = file_bytes
        for name, size in on_disk:
            leaving = self.disk.admit(name, size)
            self.dropped += [name] if leaving is None else leaving

    def found(self, names: Iterable[str]) -> list[Tier]:
        """Where the leading pages of `names` are, up to the first that is nowhere."""
        tiers: list[Tier] = []
        for name in names:
            if name in self.host:
                tiers.append("host")
            elif name in self.disk:
                tiers.append("disk")
            else:
                break
        return tiers

    def load(self, names: Sequence[str], block_ids: Sequence[int]) -> list[Load]:
        """Plan to bring back pages that were `found`; tell `loaded` how it went."""
        tiers = self.found(names)
        # Those that are in must not leave for those that are promoted.
        for name, tier in zip(names, tiers, strict=True):
            shelf = self.host if tier == "host" else self.disk
            shelf.touch(name)
            shelf.hold(name)
        plan: list[Load] = []
        for name, tier, block_id in zip(names, tiers, block_ids, strict=True):
            from_disk = tier == "disk"
            slot = self._slot_for(name) if from_disk else self._slots[name]
            plan.append(Load(name, block_id, slot, reads_file=from_disk))
        return plan

    def loaded(self, loads: Iterable[Load], lost: Iterable[str]) -> None:
        """Note that loads ended, and of which pages the content was not there."""
        for name in lost:
            self._free(self.host.lose(name))
            self.dropped += self.disk.lose(name)
        for load in loads:
            if load.slot is not None:
                self._free(self.host.release(load.name))
            if load.reads_file:
                self.dropped += self.disk.release(load.name)

    def store(self, name: str, block_id: int) -> Store | None:
        """Plan to keep a page; `None` if it is kept already, or there is no room for it now.

        Tell `written` how it went with a file that is to be written.
        """
        if name in self.disk:
            self.disk.touch(name)
        if name in self.host:
            self.host.touch(name)
            return None
        slot = self._slot_for(name)
        if slot is None:
            self._skipped += 1
            return None
        writes = name not in self.disk and self._make_file(name)
        if not writes:
            self.host.release(name)
        return Store(name, block_id, slot, writes_file=writes)

    def written(self, name: str, *, is_there: bool) -> None:
        """Note that the writing of a file ended, and whether it is there."""
        self._free(self.host.release(name))
        if not is_there:
            self.disk.lose(name)
        self.dropped += self.disk.release(name)

    def forget(self, prefix: str) -> None:
        """Find nothing any more whose name begins so. What moves is dropped once it ended."""
        for name in self.host:
            if name.startswith(prefix):
                self._free(self.host.lose(name))
        for name in self.disk:
            if name.startswith(prefix):
                self.dropped += self.disk.lose(name)

    def take_dropped(self) -> list[str]:
        """The files to be removed since this was last asked."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def take_skipped(self) -> int:
        """How many pages were not kept for want of room since this was last asked."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def _slot_for(self, name: str) -> int | None:
        """A slot that is held for a new name, or `None`."""
        leaving = self.host.admit(name, 1)
        if leaving is None:
            return None
        self._free(leaving)
        slot = self._slots[name] = self._free_slots.pop()
        self.host.hold(name)
        return slot

    def _make_file(self, name: str) -> bool:
        leaving = self.disk.admit(name, self._file_bytes) if self.disk.capacity else None
        if leaving is None:
            return False
        self.dropped += leaving
        self.disk.hold(name)
        return True

    def _free(self, names: Iterable[str]) -> None:
        self._free_slots += [self._slots.pop(name) for name in names]
