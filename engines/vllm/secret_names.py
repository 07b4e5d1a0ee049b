"""What is secret on a server's command line and in its environment, judged by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pydantic import JsonValue

from kvtune.address import API_KEY_VARIABLE
from kvtune.errors import BadInput

REFUSED = (401, 403)
"""The HTTP statuses of a server that wants a key, or another one."""

KEY_FIX = f"export {API_KEY_VARIABLE}=..., the key that the server was started with"

# "TOKENIZERS_PARALLELISM" and the like must stay plain: the word has to end.
_SECRET_WORD = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE
)
_TOKEN_LIMIT = re.compile(r"TOKENS(_|$)|TOKEN_(THRESHOLD|LIMIT|BUDGET|COUNT)", re.IGNORECASE)
_LIMIT = re.compile(r"\d{1,9}")

# Options that carry a secret, and the variable from which the engine takes the same.
_SECRET_OPTIONS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}

# A value that only refers to a variable, as a shell writes it, gives nothing away.
_ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)=(?=[\"']?(?!\$)([^\s\"']+))")
_OPTION = re.compile(rf"--({'|'.join(_SECRET_OPTIONS)})[ =]+[\"']?(?![\"'$-])\S")


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


def key_problem() -> str:
    """Why a server refuses kvtune: it sent no key, or one that the server does not take."""
    if os.environ.get(API_KEY_VARIABLE):
        return f"it does not take the API key in {API_KEY_VARIABLE}"
    return f"it asks for an API key, and {API_KEY_VARIABLE} is not set"


def refuse_secret_arguments(arguments: Mapping[str, JsonValue]) -> None:
    """Keep secrets out of what is stored, shown and exported.

    Raises:
        BadInput: an argument carries a secret.
    """
    for name, value in arguments.items():
        variable = secret_variable(name, value)
        if variable is not None and value is not None:
            raise BadInput(
                f"--{name} in the engine arguments is a secret, and they are stored and shown",
                f"leave it out and set the variable instead: export {variable}=...",
            )


def refuse_secrets_in_command(template: str) -> None:
    """Keep secrets out of a command that is stored with the study it belongs to.

    Raises:
        BadInput: the command sets a secret variable, or passes a secret option.
    """
    for name, value in _ASSIGNMENT.findall(template):
        if is_secret(name, value):
            raise BadInput(
                f"the engine command holds the value of {name}, and commands are stored",
                f"export {name}, and write only its name in the command: docker run -e {name} ...",
            )
    if found := _OPTION.search(template):
        variable = _SECRET_OPTIONS[found[1]]
        raise BadInput(
            f"--{found[1]} in the engine command is a secret, and commands are stored",
            f"export {variable} and hand it to the server: docker run -e {variable} ...",
        )
