"""The simulated engine: starts a real server process that needs no model, device or vLLM."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import JsonValue

from kvtune import __version__
from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.engines.simulated.options import parse
from kvtune.engines.vllm.arguments import to_argv
from kvtune.engines.vllm.effective import read_effective
from kvtune.engines.vllm.failures import classify
from kvtune.engines.vllm.log import LogTail
from kvtune.engines.vllm.process import GuardedProcess, start_guarded
from kvtune.engines.vllm.readiness import (
    check_listener,
    check_model,
    free_port,
    get_json,
    http_get,
    wait_until_ready,
)
from kvtune.types import EffectiveConfig, Endpoint, EngineInfo, Failure

_ANSWER_TIMEOUT_S = 10.0


class SimulatedServer(RunningServer):
    """A simulated server that is ready."""

    def __init__(
        self,
        process: GuardedProcess,
        tail: LogTail,
        *,
        endpoint: Endpoint,
        effective: EffectiveConfig,
        start_s: float,
        log_path: Path,
    ) -> None:
        self._process = process
        self._tail = tail
        self._failure: Failure | None = None
        self._is_stopped = False
        self.endpoint = endpoint
        self.effective = effective
        self.start_s = start_s
        self.log_path = log_path

    def failure(self) -> Failure | None:
        """Why the process ended by itself, with the last error of its log."""
        if self._failure is None and not self._is_stopped:
            returncode = self._process.poll()
            if returncode is not None:
                self._tail.stop()
                self._failure = classify(_read(self.log_path), returncode=returncode, phase="load")
        return self._failure

    def stop(self) -> None:
        """End the process and wait until it is gone."""
        self._is_stopped = True
        self._process.stop()
        self._tail.stop()


class SimulatedEngine(Engine):
    """Starts simulated servers. `arguments` go to every one, under those that a server is given.

    Options are vLLM's where they matter to the model of the cache (`block-size`, `max-num-seqs`,
    ...) and `simulate-...` for its speed and its faults; see `kvtune.engines.simulated.options`.
    """

    name: ClassVar[str] = "simulated"

    def __init__(self, arguments: Mapping[str, JsonValue] | None = None) -> None:
        self._arguments = dict(arguments or {})

    def describe(self) -> EngineInfo:
        """Return kvtune's own version: the engine is part of it."""
        return EngineInfo(
            name=self.name,
            version=__version__,
            distribution="kvtune",
            platform="simulated",
            python=sys.executable,
        )

    def check_arguments(self, arguments: Mapping[str, JsonValue], model: str) -> tuple[str, ...]:
        """Problems with names, types and choices; values that don't go together show at start."""
        _, problems = parse(to_argv({**self._arguments, **arguments}))
        return problems

    def launch(
        self,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300,
        on_log: Callable[[str], None] | None = None,
    ) -> RunningServer:
        """Start a server and return it once it serves the model."""
        start_s = time.monotonic()
        port = free_port(spec.host) if spec.port is None else spec.port
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        process = start_guarded(
            self._command(spec, port), {**os.environ, **spec.environment}, log_path
        )
        tail = LogTail(log_path, on_log or _ignore)
        try:
            wait_until_ready(
                process,
                host=spec.host,
                port=port,
                tail=tail,
                read_log=lambda: _read(log_path),
                timeout_s=start_timeout_s,
            )
            check_listener(process, port)
            check_model(spec.host, port, spec.model_name)
            effective = _effective(spec.host, port)
        except BaseException:
            process.stop()
            tail.stop()
            raise
        return SimulatedServer(
            process,
            tail,
            endpoint=Endpoint(f"http://{spec.host}:{port}", spec.model_name, process.pid),
            effective=effective,
            start_s=time.monotonic() - start_s,
            log_path=log_path,
        )

    def _command(self, spec: ServerSpec, port: int) -> list[str]:
        arguments: dict[str, JsonValue] = {
            **self._arguments,
            **spec.arguments,
            "model": spec.model,
            "served-model-name": spec.model_name,
            "host": spec.host,
            "port": port,
        }
        # -P: a file of the user's in the working directory must not stand in for a module.
        return [sys.executable, "-P", "-m", "kvtune.engines.simulated.server", *to_argv(arguments)]


def _effective(host: str, port: int) -> EffectiveConfig:
    metrics = http_get(host, port, "/metrics", _ANSWER_TIMEOUT_S)
    return read_effective(
        server_info=get_json(host, port, "/server_info?config_format=json", _ANSWER_TIMEOUT_S),
        metrics_text=metrics[1] if metrics else "",
        log_text="",
        version=__version__,
        start_kind="cold",
    )


def _read(log_path: Path) -> str:
    return log_path.read_text(encoding="utf-8", errors="replace")


def _ignore(line: str) -> None:
    """Drop a log line that nobody asked for."""
