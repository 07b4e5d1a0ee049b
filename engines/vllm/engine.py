"""vLLM servers: found, described, checked and started, cold or from a warm parent."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import JsonValue

from kvtune.engines.base import Engine, ServerSpec
from kvtune.engines.vllm.arguments import normal_name, to_argv
from kvtune.engines.vllm.command import fill_command, read_command
from kvtune.engines.vllm.effective import differences, read_effective
from kvtune.engines.vllm.environment import (
    Installation,
    added_environment,
    find_installation,
    is_tested,
    refuse_overrides,
    refuse_without_plugin,
)
from kvtune.engines.vllm.live import live_arguments
from kvtune.engines.vllm.model_path import expand_model
from kvtune.engines.vllm.option_check import RESERVED, OptionCheck, check_in_subprocess
from kvtune.engines.vllm.process import GuardedProcess, start_guarded
from kvtune.engines.vllm.readiness import (
    check_listener,
    check_model,
    free_port,
    get_json,
    http_get,
    is_loopback,
    port_is_taken,
    server_key,
    wait_until_ready,
)
from kvtune.engines.vllm.server import HealthWatch, ServerLog, VllmServer
from kvtune.engines.vllm.warm import WarmParent, WarmTrouble
from kvtune.errors import BadInput, EngineError
from kvtune.types import EffectiveConfig, Endpoint, EngineInfo, FailureClass

_PORT_TRIES = 3
_WARM_TRIES = 2
_READ_BACK_LIMIT_S = 60.0
_LONGEST_SOCKET_FOLDER = 70
"""A socket's path has at most 107 characters, of which vLLM's own names take 37."""

StartKind = Literal["cold", "warm"]


class VllmEngine(Engine):
    """vLLM of an interpreter, or behind a command.

    `python` is the interpreter that has vLLM; default: kvtune's own. `command` starts the server
    instead, with `{args}` in the place of vLLM's arguments (and, if needed, `{port}` and
    `{model}`), e.g. `docker run --rm --init --network host vllm/vllm-openai:v0.32.0 {args}`;
    whatever it starts must answer on the spec's host and port here. Nothing is known about that
    vLLM until a server of it runs.

    `start="warm"` forks servers from a parent that has vLLM imported, which is several times
    faster. That is done on the CPU platform only: a process that has touched CUDA cannot be
    forked. Where it is not possible or goes wrong, servers are started cold, with a warning in
    `RunningServer.warnings`; `EffectiveConfig.start_kind` says which it was.

    `defaults` are arguments of every server, under those that it is given.
    """

    name: ClassVar[str] = "vllm"

    def __init__(
        self,
        python: str | None = None,
        command: str | None = None,
        start: StartKind = "warm",
        defaults: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._python = python
        self._command = read_command(command) if command is not None else None
        self._start_kind = start
        self._defaults = dict(defaults or {})
        self._installation: Installation | None = None
        self._info: EngineInfo | None = None
        self._options: OptionCheck | None = None
        self._warm: WarmParent | None = None
        self._warm_troubles = 0
        self._sockets: str | None = None

    def describe(self) -> EngineInfo:
        """Which vLLM this is; behind a command, "unknown" until a server has told.

        Raises:
            EngineError: `ENGINE_MISSING`, with how to install it.
        """
        if self._info is None:
            self._info = (
                self._found().info
                if self._command is None
                else EngineInfo(
                    name=self.name,
                    version="unknown",
                    distribution="unknown",
                    platform="unknown",
                    python=None,
                    tested=False,
                )
            )
        return self._info

    def known_options(self) -> frozenset[str]:
        """Every long option that vLLM's parser has, without dashes; empty behind a command."""
        return self._option_check().known_options() if self._command is None else frozenset()

    def check_arguments(self, arguments: Mapping[str, JsonValue], model: str) -> tuple[str, ...]:
        """Problems that vLLM's own parser finds; none are looked for behind a command."""
        return self.check_many([arguments], model)[0]

    def check_many(
        self, candidates: Sequence[Mapping[str, JsonValue]], model: str
    ) -> list[tuple[str, ...]]:
        """`check_arguments` for many candidates at the price of one."""
        if self._command is not None:
            return [() for _ in candidates]
        problems = self._option_check().check_many(candidates, model)
        return [
            found + self._plugin_problems(arguments)
            for arguments, found in zip(candidates, problems, strict=True)
        ]

    def _plugin_problems(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        try:
            refuse_without_plugin(arguments, self.describe())
        except BadInput as error:
            return (f"{error.message}; {error.fix}",)
        return ()

    def live_arguments(self, arguments: Mapping[str, JsonValue]) -> frozenset[str]:
        """The options that can be changed on a running server; none where kvtune is no plugin."""
        if self._command is not None or not self._found().can_change:
            return frozenset()
        return live_arguments(arguments, keeps_sizes=self.describe().platform == "cpu")

    def launch(
        self,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300,
        on_log: Callable[[str], None] | None = None,
    ) -> VllmServer:
        """Start a server and return it once it serves the expected model.

        `log_path` is overwritten. `start_s` leaves out the import of a new warm parent, which is
        paid once.

        Raises:
            EngineError: it did not start. The class says why; nothing is left running.
            BadInput: the arguments hold what kvtune sets itself, or the address is not ours.
        """
        if taken := sorted(RESERVED & set(map(normal_name, spec.arguments))):
            raise BadInput(
                f"--{taken[0]} cannot be an engine argument: kvtune sets it itself",
                "Use kvtune's own option for it.",
            )
        if spec.port is not None and port_is_taken(spec.host, spec.port):
            raise EngineError(
                FailureClass.PORT_TAKEN,
                f"something listens on port {spec.port} already",
                "Choose another port, or stop what listens there.",
            )
        for tries_left in reversed(range(_PORT_TRIES if spec.port is None else 1)):
            port = spec.port or free_port(spec.host)
            try:
                return self._launch_on(port, spec, log_path, start_timeout_s, on_log)
            except EngineError as error:
                # Between our look and the server's, somebody else may have taken the port.
                if error.failure is not FailureClass.PORT_TAKEN or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """End the warm parent, and with it every server that was forked from it."""
        self._close_warm()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    def _close_warm(self) -> None:
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def _socket_folder(self, added: Mapping[str, str]) -> dict[str, str]:
        """Where servers put their sockets: vLLM leaves them behind, whichever way it ends.

        Nothing where the user says it, where a command may run elsewhere, or where the path would
        be longer than a socket's may be.
        """
        name = "VLLM_RPC_BASE_PATH"
        if name in os.environ or name in added or self._command is not None:
            return {}
        if self._sockets is None:
            self._sockets = tempfile.mkdtemp(prefix="kvtune-")
        return {name: self._sockets} if len(self._sockets) <= _LONGEST_SOCKET_FOLDER else {}

    def _found(self) -> Installation:
        if self._installation is None:
            self._installation = find_installation(self._python)
        return self._installation

    def _option_check(self) -> OptionCheck:
        if self._options is None:
            self._options = OptionCheck(self.describe(), self._ask_parser)
        return self._options

    def _ask_parser(self, lists: Sequence[Sequence[str]]) -> dict[str, Any]:
        if self._warm is not None:
            try:
                return self._warm.check(lists)
            except WarmTrouble:
                self._drop_warm()
        answer: dict[str, Any] = check_in_subprocess(self._found(), lists)
        return answer

    def _launch_on(
        self,
        port: int,
        spec: ServerSpec,
        log_path: Path,
        start_timeout_s: float,
        on_log: Callable[[str], None] | None,
    ) -> VllmServer:
        given = spec.arguments
        spec = replace(spec, arguments={**self._defaults, **given})
        model = expand_model(spec.model) if self._command is None else spec.model
        platform = self.describe().platform
        refuse_overrides(spec.arguments, spec.environment, platform=platform)
        refuse_without_plugin(spec.arguments, self.describe())
        added = added_environment(
            spec.environment,
            platform=platform,
            model=model,
            measured=spec.measured and is_loopback(spec.host),
        )
        added |= self._socket_folder(added)
        argv = _server_argv(spec, model, port)
        warm, warnings = self._warm_parent(added)
        log = ServerLog(log_path, on_log)
        process: GuardedProcess | None = None
        start_s = time.monotonic()
        try:
            kind: StartKind = "cold"
            if warm is not None:
                try:
                    process, kind = warm.serve(argv, log_path), "warm"
                except WarmTrouble as trouble:
                    self._drop_warm()
                    warnings += (f"started cold: {trouble}",)
            if process is None:
                command = self._cold_command(argv, spec, port)
                process = start_guarded(command, {**os.environ, **added}, log_path)
            wait_until_ready(
                process,
                host=spec.host,
                port=port,
                tail=log.tail,
                read_log=log.read,
                timeout_s=start_timeout_s,
            )
            ready_s = time.monotonic() - start_s
            if self._command is None:
                check_listener(process, port)
            check_model(spec.host, port, spec.model_name, server_key(spec.arguments, added))
            effective = self._read_back(spec, port, log, kind)
        except BaseException:
            if process is not None:
                process.stop()
            log.tail.stop()
            raise
        return VllmServer(
            endpoint=Endpoint(f"http://{spec.host}:{port}", spec.model_name, process.pid),
            effective=effective,
            start_s=ready_s,
            warnings=warnings + differences(spec.arguments, effective, log.read()),
            process=process,
            log=log,
            health=HealthWatch(spec.host, port),
            address=(spec.host, port),
            arguments=given,
        )

    def _cold_command(self, argv: list[str], spec: ServerSpec, port: int) -> list[str]:
        if self._command is not None:
            return fill_command(self._command, argv, model=spec.model, port=port)
        found = self._found()
        return [found.python, "-m", found.module, *argv]

    def _warm_parent(self, added: Mapping[str, str]) -> tuple[WarmParent | None, tuple[str, ...]]:
        """The warm parent for this environment, started if need be, or why there is none."""
        if self._start_kind == "cold" or self._command is not None:
            return None, ()
        if not self._found().can_start_warm or self._warm_troubles >= _WARM_TRIES:
            return None, ()
        if self._warm is not None and self._warm.added_environment != added:
            self._close_warm()
        if self._warm is None:
            try:
                self._warm = WarmParent(self._found().python, added)
            except WarmTrouble as trouble:
                self._warm_troubles += 1
                return None, (f"started cold: {trouble}",)
        return self._warm, ()

    def _drop_warm(self) -> None:
        self._warm_troubles += 1
        self._close_warm()

    def _read_back(
        self, spec: ServerSpec, port: int, log: ServerLog, kind: StartKind
    ) -> EffectiveConfig:
        """Ask the server what it runs with, and remember which vLLM it is."""
        version = (get_json(spec.host, port, "/version", _READ_BACK_LIMIT_S) or {}).get("version")
        metrics = http_get(spec.host, port, "/metrics", _READ_BACK_LIMIT_S)
        info = get_json(spec.host, port, "/server_info?config_format=json", _READ_BACK_LIMIT_S)
        if self._command is not None and isinstance(version, str):
            self._learn(version, info or {})
        return read_effective(
            server_info=info,
            metrics_text=metrics[1] if metrics else "",
            log_text=log.read(),
            version=version,
            start_kind=kind,
        )

    def _learn(self, version: str, server_info: Mapping[str, Any]) -> None:
        """Describe the vLLM behind a command by what a server of it says."""
        config = server_info.get("vllm_config") or {}
        device = (config.get("device_config") or {}).get("device")
        self._info = self.describe().model_copy(
            update={
                "version": version,
                "tested": is_tested(version),
                "platform": device if device in ("cpu", "cuda") else "unknown",
            }
        )


def _server_argv(spec: ServerSpec, model: str, port: int) -> list[str]:
    """vLLM's arguments for a spec: what kvtune sets, then the engine arguments."""
    own: dict[str, JsonValue] = {"model": model, "host": spec.host, "port": port}
    if spec.model_name != model:
        own["served-model-name"] = spec.model_name
    return to_argv({**own, **spec.arguments})
