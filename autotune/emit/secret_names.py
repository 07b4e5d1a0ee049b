"""What is secret in a serving config, so that no emitted file ever holds it."""

from __future__ import annotations

import re

from kvtune.engines.vllm.secret_names import is_secret, secret_variable
from kvtune.errors import BadInput
from kvtune.types import ServingConfig

__all__ = ["is_secret", "secret_variable", "split_environment"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split_environment(config: ServingConfig) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables to write down, and the names of those that a person must supply; both sorted.

    Raises:
        BadInput: a name is not the name of a variable, or a value holds a NUL.
    """
    plain: dict[str, str] = {}
    secret: set[str] = set()
    for name, value in sorted(config.environment.items()):
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise BadInput(
                f"{name!r} cannot be set as an environment variable",
                "a name has letters, digits and underscores only, and a value no NUL character",
            )
        if is_secret(name, value):
            secret.add(name)
        else:
            plain[name] = value
    for setting in config.settings:
        variable = secret_variable(setting.name, setting.value)
        if variable is not None and setting.value is not None:
            secret.add(variable)
    return plain, tuple(sorted(secret))
