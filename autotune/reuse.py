"""Keep a server running for the next trial, if it can be changed to that one's settings.

A start takes seconds on a CPU and minutes on a GPU; what only the scheduler goes by can be changed
in milliseconds. At most one server runs at a time, and only one that its last user found in order
is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import JsonValue

from kvtune.engines.base import CannotChange, Engine, RunningServer, ServerSpec
from kvtune.engines.vllm.arguments import normal_name
from kvtune.engines.vllm.effective import read_back
from kvtune.types import EngineInfo, Failure


@dataclass(frozen=True, slots=True)
class Kept:
    """A server that waits for its next use. `spec` is what it was last used as."""

    server: RunningServer
    spec: ServerSpec


class ServerPool(Engine):
    """Another engine, whose `reusable` servers outlive their trial until the next launch.

    A launch changes the kept server where only live options differ, and stops it otherwise. What is
    not reusable gets a server of its own, as does everything without `reuse`. To have room for what
    comes next, a reusable server is started as wide as stock defaults and then narrowed, once these
    are known. The other engine is not closed by this one.
    """

    name: ClassVar[str] = "pool"

    def __init__(self, engine: Engine, *, reuse: bool = True) -> None:
        self._engine = engine
        self._reuse = reuse
        self._kept: Kept | None = None
        self._stock: dict[str, JsonValue] = {}
        self._is_narrowing = True

    def describe(self) -> EngineInfo:
        """Which engine it is that starts the servers."""
        return self._engine.describe()

    def check_arguments(self, arguments: Mapping[str, JsonValue], model: str) -> tuple[str, ...]:
        """Problems that the engine's own parser finds."""
        return self._engine.check_arguments(arguments, model)

    def launch(
        self,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300,
        on_log: Callable[[str], None] | None = None,
    ) -> RunningServer:
        """Return a server that runs with the spec's arguments, changed or started.

        Raises:
            EngineError: it did not start, or died when it was changed. No server is left.
        """

        def start(wanted: ServerSpec) -> RunningServer:
            return self._engine.launch(
                wanted, log_path=log_path, start_timeout_s=start_timeout_s, on_log=on_log
            )

        if not (self._reuse and spec.reusable):
            self.close()
            return start(spec)
        began_s = time.monotonic()
        server = self._changed(spec)
        if server is not None:
            _say_whose_log(log_path, server)
            return Lease(self, server, spec, start_s=time.monotonic() - began_s)
        return self._started(spec, start)

    def close(self) -> None:
        """End the server that is kept."""
        if self._kept is not None:
            self._kept.server.stop()
            self._kept = None

    def take_back(self, server: RunningServer, spec: ServerSpec) -> None:
        """Keep a server that its user is done with."""
        self._kept = Kept(server, spec)

    def _changed(self, spec: ServerSpec) -> RunningServer | None:
        """The kept server with the spec's arguments; it is stopped if it cannot have them."""
        if self._kept is None:
            return None
        server = self._kept.server
        try:
            if self._cold(self._kept.spec) != self._cold(spec) or server.failure() is not None:
                raise CannotChange("it is another server that is needed")
            server.change(spec.arguments)
        except CannotChange:
            self.close()
            return None
        except BaseException:
            self.close()
            raise
        self._kept = None
        return server

    def _started(
        self, spec: ServerSpec, start: Callable[[ServerSpec], RunningServer]
    ) -> RunningServer:
        wide = replace(spec, arguments=self._widened(spec.arguments))
        server = start(wide)
        start_s = server.start_s
        if wide.arguments != spec.arguments:
            began_s = time.monotonic()
            try:
                server.change(spec.arguments)
            except CannotChange as refusal:
                server.stop()
                self._is_narrowing = False
                leased = self._started(spec, start)
                leased.warnings += (f"started twice, as it could not be changed: {refusal}",)
                return leased
            except BaseException:
                server.stop()
                raise
            start_s += time.monotonic() - began_s
            leased = Lease(self, server, spec, start_s=start_s)
            leased.effective = server.effective.model_copy(update={"start_kind": "narrowed"})
            return leased
        self._learn_stock(spec.arguments, server)
        return Lease(self, server, spec, start_s=start_s)

    def _cold(self, spec: ServerSpec) -> ServerSpec:
        live = self._engine.live_arguments(spec.arguments)
        return replace(
            spec,
            arguments={
                name: value
                for name, value in spec.arguments.items()
                if normal_name(name) not in live and value is not None
            },
        )

    def _learn_stock(self, arguments: Mapping[str, JsonValue], server: RunningServer) -> None:
        given = {normal_name(name) for name in arguments}
        for name in self._engine.live_arguments(arguments) - given:
            self._stock.setdefault(name, read_back(name, server.effective))

    def _widened(self, arguments: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """The arguments without live numbers that a change can bring down from stock defaults."""
        if not self._is_narrowing:
            return dict(arguments)
        live = self._engine.live_arguments(arguments)

        def is_narrower(name: str, value: JsonValue) -> bool:
            stock = self._stock.get(name) if name in live else None
            if isinstance(value, bool) or isinstance(stock, bool):
                return False
            return isinstance(value, int) and isinstance(stock, int) and value <= stock

        return {
            name: value
            for name, value in arguments.items()
            if not is_narrower(normal_name(name), value)
        }


class Lease(RunningServer):
    """A server of a pool while it is used. `start_s` is what it took to have it."""

    def __init__(
        self, pool: ServerPool, server: RunningServer, spec: ServerSpec, *, start_s: float
    ) -> None:
        self.endpoint = server.endpoint
        self.effective = server.effective
        self.start_s = start_s
        self.log_path = server.log_path
        self.warnings = server.warnings
        self._pool = pool
        self._server = server
        self._spec = spec
        self._is_kept = False
        self._is_over = False

    def failure(self) -> Failure | None:
        """Why the server no longer serves; `None` while it does."""
        return self._server.failure()

    def keep(self) -> None:
        """Say that all went well: the pool may use the server again."""
        self._is_kept = True

    def stop(self) -> None:
        """Give the server back to the pool if all went well, else end it."""
        if self._is_over:
            return
        if self._is_kept and self._server.failure() is None:
            self._pool.take_back(self._server, self._spec)
        else:
            self._server.stop()
        self._is_over = True


def _say_whose_log(log_path: Path, server: RunningServer) -> None:
    """Leave at a trial's log where to read on; a note that cannot be written is no failure."""
    with contextlib.suppress(OSError):
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_text(
            f"No server was started: that of {server.log_path.name} was changed while it ran.\n"
        )
