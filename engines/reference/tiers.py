"""Host and disk tiers of the reference engine: named tensors that come back as they were.

A file that is missing, cut short or altered is noticed by its SHA-256 and counts as a miss, with a
warning: what it held is computed again. So is a disk that is full.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvtune.errors import BadInput
from kvtune.policies.methods.tiers import Tiers
from kvtune.policies.plane import tensor_bytes
from kvtune.policies.tiering import LEAVING, Leaving, Tier

PROBE_BYTES = 16 << 20
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class File:
    """What is known of a file on the disk tier. `nbytes` are those of the tensors."""

    path: Path
    digest: str
    nbytes: int


class TierStore:
    """Objects of named tensors in host memory, and behind it on disk.

    Each object is on one tier. Bytes are those of the tensors, the headers of files not counted.
    """

    def __init__(self, method: Tiers, device: torch.device) -> None:
        """Make an empty store; its files vanish with it.

        Raises:
            BadInput: the folder for files cannot be used.
        """
        self.method = method
        self.device = device
        self._host: dict[str, dict[str, Tensor]] = {}
        self._disk: dict[str, File] = {}
        self._order: dict[Tier, Leaving] = {
            "host": LEAVING[method.eviction](),
            "disk": LEAVING[method.eviction](),
        }
        self._bytes: dict[Tier, int] = {"host": 0, "disk": 0}
        self._folder: Path | None = None
        if method.disk_bytes:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="kvtune-tier-", dir=method.folder))
            except OSError as error:
                raise BadInput(
                    f"the disk tier cannot use {method.folder}: {error}",
                    fix="give a folder that exists and can be written",
                ) from error
            weakref.finalize(self, shutil.rmtree, self._folder, True)

    def held_bytes(self, tier: Tier) -> int:
        """Bytes of the objects on a tier."""
        return self._bytes[tier]

    def tier_of(self, key: str) -> Tier | None:
        """Where an object is; None: nowhere."""
        if key in self._host:
            return "host"
        return "disk" if key in self._disk else None

    def bytes_of(self, key: str) -> int:
        """Bytes of an object's tensors; 0 if it is not there."""
        if key in self._host:
            return tensor_bytes(self._host[key])
        return self._disk[key].nbytes if key in self._disk else 0

    def put(self, key: str, tensors: Tensors) -> Tier | None:
        """Keep copies of tensors; return where, None if no tier has room.

        An object that is there already is not written again.
        """
        known = self.tier_of(key)
        if known is not None:
            self._order[known].hit(key)
            return known
        nbytes = tensor_bytes(tensors)
        if nbytes <= self.method.host_bytes:
            self._make_room("host", key, nbytes)
            self._host[key] = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
            self._admit("host", key, nbytes)
            return "host"
        return self._put_on_disk(key, tensors)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return an object's tensors on the device; None: it is not there, or no longer whole."""
        tier = self.tier_of(key)
        if tier is None:
            return None
        if tier == "host":
            self._order["host"].hit(key)
            return {name: x.to(self.device, copy=True) for name, x in self._host[key].items()}
        content = self._read(self._disk[key])
        if content is None:
            self.drop(key)
            return None
        self._order["disk"].hit(key)
        return {name: x.to(self.device) for name, x in load(content).items()}

    def drop(self, key: str) -> None:
        """Forget an object."""
        tier = self.tier_of(key)
        if tier is None:
            return
        self._order[tier].forget(key)
        self._take_out(tier, key)

    def probe(self, nbytes: int = PROBE_BYTES) -> dict[Tier, float]:
        """Measure the bytes a second from each tier to the device, with `nbytes` of noise.

        The file is flushed and dropped from the page cache before it is read, where the system
        allows that.
        """
        noise = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        began = time.perf_counter()
        noise.to(self.device, copy=True)
        self._synchronize()
        found: dict[Tier, float] = {"host": nbytes / (time.perf_counter() - began)}
        if self._folder is not None:
            path = self._folder / "probe"
            try:
                path.write_bytes(save({"noise": noise}))
                _leave_page_cache(path)
                began = time.perf_counter()
                load(path.read_bytes())["noise"].to(self.device)
                self._synchronize()
                found["disk"] = nbytes / (time.perf_counter() - began)
            except OSError as error:
                warnings.warn(f"the disk tier cannot be probed: {error}", stacklevel=2)
            finally:
                path.unlink(missing_ok=True)
        return found

    def _put_on_disk(self, key: str, tensors: Tensors) -> Tier | None:
        nbytes = tensor_bytes(tensors)
        if self._folder is None or nbytes > self.method.disk_bytes:
            return None
        self._make_room("disk", key, nbytes)
        content = save(
            {
                name: x.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, x in tensors.items()
            }
        )
        path = self._folder / hashlib.sha256(key.encode()).hexdigest()
        try:
            path.write_bytes(content)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            warnings.warn(f"the disk tier cannot keep an object: {error}", stacklevel=3)
            return None
        self._disk[key] = File(path, hashlib.sha256(content).hexdigest(), nbytes)
        self._admit("disk", key, nbytes)
        return "disk"

    def _read(self, file: File) -> bytes | None:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            warnings.warn(f"an object is gone from the disk tier: {error}", stacklevel=3)
            return None
        if hashlib.sha256(content).hexdigest() != file.digest:
            warnings.warn(f"{file.path} was altered, and is not used", stacklevel=3)
            return None
        return content

    def _make_room(self, tier: Tier, incoming: str, nbytes: int) -> None:
        capacity = self.method.host_bytes if tier == "host" else self.method.disk_bytes
        order = self._order[tier]
        order.miss(incoming)
        while self._bytes[tier] + nbytes > capacity:
            leaving = str(order.evict(incoming))
            tensors = self._take_out(tier, leaving)
            if tensors is not None:
                self._put_on_disk(leaving, tensors)

    def _admit(self, tier: Tier, key: str, nbytes: int) -> None:
        self._order[tier].admit(key)
        self._bytes[tier] += nbytes

    def _take_out(self, tier: Tier, key: str) -> Tensors | None:
        """Remove an object from a tier; what the host held is returned."""
        if tier == "host":
            tensors = self._host.pop(key)
            self._bytes["host"] -= tensor_bytes(tensors)
            return tensors
        file = self._disk.pop(key)
        self._bytes["disk"] -= file.nbytes
        with suppress(OSError):
            file.path.unlink(missing_ok=True)
        return None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _leave_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
