"""What kvtune asks of an engine: describe itself, check arguments, start a server, stop it.

Engines launch and never measure. They own the processes and ports of what they start, and they
turn every way a server can fail into a `FailureClass` with the decisive line of its log.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pydantic import JsonValue

from kvtune.types import EffectiveConfig, Endpoint, EngineInfo, Failure


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server to start.

    `arguments` maps the engine's long option names (no dashes) to values, as in
    `kvtune.types.Choice`. `environment` is added to kvtune's own. `port=None` takes a free port.
    `served_model_name=None` serves the model under its own name.

    `measured` servers live for a measurement: on a loopback address they get the engine's
    development addresses, which tell the effective configuration, and ask for no API key. A server
    for others to use is started with `measured=False`.

    `reusable`: a running server that is changed to these arguments will do. Who keeps servers
    running for that is the one that launches, see `RunningServer.keep`.
    """

    model: str
    served_model_name: str | None = None
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int | None = None
    measured: bool = True
    reusable: bool = False

    @property
    def model_name(self) -> str:
        """The model name that requests carry and that `/v1/models` must list."""
        return self.served_model_name or self.model


class CannotChange(Exception):
    """A running server cannot become what was asked for, but a start can. The message says why."""


class RunningServer(ABC):
    """A ready server. Use it as a context manager, or call `stop`.

    `effective` is what the engine says it runs with, `start_s` the seconds from launch to ready,
    `log_path` the file that holds all its output, and `warnings` what is odd about the start (an
    argument that reads back differently, a warm start that fell back to a cold one).
    """

    endpoint: Endpoint
    effective: EffectiveConfig
    start_s: float
    log_path: Path
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def failure(self) -> Failure | None:
        """Why the server no longer serves, with the decisive log line; `None` while it is fine."""

    @abstractmethod
    def stop(self) -> None:
        """End the server and everything it started. May be called again, from any state."""

    def change(self, arguments: Mapping[str, JsonValue]) -> EffectiveConfig:
        """Make this idle server what one started with `arguments` is, with an empty prefix cache.

        `effective` and `warnings` then tell of that, with "live" as the kind of start.

        Raises:
            CannotChange: it can't be done exactly, or not now. The server is to be stopped.
            EngineError: the server died of it.
        """
        raise CannotChange("servers of this engine are not changed while they run")

    def keep(self) -> None:  # noqa: B027 - what nobody keeps needs none
        """Say that all went well, so that `stop` may keep the server for the next launch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class Engine(ABC):
    """A way to run a model. Use it as a context manager, or call `close` at the end."""

    name: ClassVar[str]

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Which version on which platform. Cached, and quick: nothing heavy is imported.

        Raises:
            EngineError: `ENGINE_MISSING`, with how to install it.
        """

    @abstractmethod
    def check_arguments(self, arguments: Mapping[str, JsonValue], model: str) -> tuple[str, ...]:
        """Problems that the engine's own parser finds in `arguments`; empty when it takes them."""

    @abstractmethod
    def launch(
        self,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300,
        on_log: Callable[[str], None] | None = None,
    ) -> RunningServer:
        """Start a server and return it once it serves the expected model.

        `on_log` gets every line of its output, from another thread.

        Raises:
            EngineError: it did not start. The class says why; no process of kvtune's is left. What
                a command has others start, such as a container, ends if that command ends it.
        """

    def live_arguments(self, arguments: Mapping[str, JsonValue]) -> frozenset[str]:
        """The options that `RunningServer.change` can set on a server with `arguments`."""
        return frozenset()

    def close(self) -> None:  # noqa: B027 - an engine that keeps nothing needs none
        """End everything the engine keeps between launches. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
