"""The simulated engine: starts a real server process that needs no model, device or vLLM."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import JsonValue

from kvtune import __version__
from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.engines.simulated.options import parse
from kvtune.engines.vllm.arguments import normal_name, to_argv
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.engines.vllm.live import live_arguments
from kvtune.engines.vllm.option_check import RESERVED
from kvtune.types import EngineInfo

# -P: a file of the user's in the working directory must not stand in for a module.
_COMMAND = f"{shlex.quote(sys.executable)} -P -m kvtune.engines.simulated.server {{args}}"


class SimulatedEngine(Engine):
    """Starts simulated servers. `arguments` go to every one, under those that a server is given.

    Options are vLLM's where they matter to the model of the cache (`block-size`, `max-num-seqs`,
    ...) and `simulate-...` for its speed and its faults; see `kvtune.engines.simulated.options`.
    The server speaks like vLLM, so it is started, watched and read back as a vLLM behind a command.
    """

    name: ClassVar[str] = "simulated"

    def __init__(self, arguments: Mapping[str, JsonValue] | None = None) -> None:
        self._arguments = dict(arguments or {})
        self._starter = VllmEngine(command=_COMMAND, defaults=self._arguments)

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
        taken = sorted(RESERVED & set(map(normal_name, arguments)))
        _, problems = parse(to_argv({**self._arguments, **arguments}))
        return (*(f"--{name} is set by kvtune itself" for name in taken), *problems)

    def live_arguments(self, arguments: Mapping[str, JsonValue]) -> frozenset[str]:
        """The options that can be changed on a running server: those of a vLLM on a CPU.

        Nothing is compiled here and nothing measured at the start, so sizes can be changed always.
        """
        pinned = {**arguments, "enforce-eager": True, "num-gpu-blocks-override": 1}
        return live_arguments(pinned, keeps_sizes=True)

    def launch(
        self,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300,
        on_log: Callable[[str], None] | None = None,
    ) -> RunningServer:
        """Start a server and return it once it serves the model; `log_path` is overwritten.

        Raises:
            EngineError: it did not start. The class says why; nothing is left running.
            BadInput: the arguments hold what kvtune sets itself.
        """
        return self._starter.launch(
            spec, log_path=log_path, start_timeout_s=start_timeout_s, on_log=on_log
        )
