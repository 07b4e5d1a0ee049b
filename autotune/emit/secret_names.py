"""What is secret in a serving config, so that no emitted file ever holds it."""

from __future__ import annotations

import re

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.types import ServingConfig

# "TOKENIZERS_PARALLELISM" and the like must stay plain: the word has to end.
_SECRET_WORD = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE
)
_TOKEN_LIMIT = re.compile(r"TOKENS(_|$)|TOKEN_(THRESHOLD|LIMIT|BUDGET|COUNT)", re.IGNORECASE)
_LIMIT = re.compile(r"\d{1,9}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Options that carry a secret, and the variable from which the engine takes the same.
_SECRET_OPTIONS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable holds a secret, judged by its name.

    A limit counted in tokens, such as `VLLM_MAX_BAD_WORDS_TOTAL_TOKENS=4096`, is none.
    """
    if _TOKEN_LIMIT.search(name) and _LIMIT.fullmatch(value):
        return False
    return _SECRET_WORD.search(name) is not None


def secret_variable(option: str, value: JsonValue) -> str | None:
    """The environment variable that replaces a secret engine option; `None` for all others."""
    if isinstance(value, bool):
        return None
    return _SECRET_OPTIONS.get(option.replace("_", "-"))


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
