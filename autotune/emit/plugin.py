"""What a config that asks for kvtune's plugin needs where vLLM runs: the plugin, and a check of it.

A vLLM without it takes the same arguments and serves without its policies, not a word said. So does
one whose `VLLM_PLUGINS` names others only.
"""

from __future__ import annotations

import shlex

from kvtune.policies.plugin_arguments import asked_by
from kvtune.types import ServingConfig

CONTAINER_PYTHON = "python3"
PLUGINS = "VLLM_PLUGINS"
_CHECK = (
    "import os, kvtune.engines.vllm.plugin; "
    f'"kvtune" in os.environ.get("{PLUGINS}", "kvtune").split(",") or '
    f'exit("{PLUGINS} is set and does not name kvtune")'
)
"""vLLM splits the variable at commas, blanks and all, and loads nothing where it is empty."""


def asks_for_plugin(config: ServingConfig) -> bool:
    """Whether the settings name policies that only the plugin serves."""
    return asked_by({setting.name: setting.value for setting in config.settings}).is_asked


def requirement(config: ServingConfig) -> str:
    """What to install: the kvtune whose plugin was measured."""
    return f"kvtune=={config.engine.plugin or config.kvtune_version}"


def plugin_note(config: ServingConfig) -> str:
    """What a person has to install, and what happens if they do not."""
    return (
        "Some settings are served by kvtune's plugin for vLLM, which has to be installed in the "
        f"environment that runs vLLM: pip install {requirement(config)}. A vLLM without it ignores "
        f"them without a word, and so does one whose {PLUGINS} is set and does not name kvtune. "
        "Give nothing more under --additional-config on the command line: of "
        "a whole and its parts vLLM keeps one."
    )


def load_check(python: str) -> str:
    """The shell command that fails where vLLM would not load the plugin; `python` stands as is."""
    return f"{python} -c {shlex.quote(_CHECK)}"


def check_command(config: ServingConfig, python: str) -> str:
    """The same, with words for who has to mend it, and an end of the shell that runs it."""
    told = (
        f"vLLM would not load kvtune's plugin, and ignore its settings: pip install "
        f"{requirement(config)} beside it, and name kvtune in {PLUGINS} where that is set"
    )
    return f"{load_check(python)} || {{ echo {shlex.quote(told)} >&2; exit 1; }}"


def dockerfile(config: ServingConfig, image: str) -> str:
    """An image with the plugin, on top of another."""
    return f"FROM {image}\nRUN pip install {requirement(config)}\n"
