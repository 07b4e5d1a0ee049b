"""The command that a user gives to start a server, with `{args}` in the place of its arguments."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import PurePath

from kvtune.errors import BadInput


def read_command(template: str) -> list[str]:
    """Split a command template into words.

    Raises:
        BadInput: quotes that do not close, no `{args}`, or a program that is not there.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise BadInput(
            f"the engine command cannot be read: {error}", "Close the quotes."
        ) from error
    if not any("{args}" in word for word in words):
        raise BadInput(
            "the engine command has no {args}, the place of vLLM's arguments",
            "For example: docker run --rm --init --network host vllm/vllm-openai:v0.32.0 {args}",
        )
    if shutil.which(words[0]) is None:
        raise BadInput(
            f"the engine command starts {words[0]!r}, which is not an executable here",
            "Install it, or give its full path.",
        )
    return words


def fill_command(words: Sequence[str], argv: Sequence[str], *, model: str, port: int) -> list[str]:
    """Put the arguments in: as words of their own, or quoted inside a longer word.

    Behind ssh they are quoted too: it joins its words, and a shell on the far side splits them.
    """
    is_remote = PurePath(words[0]).name == "ssh"
    arguments = [shlex.quote(word) for word in argv] if is_remote else list(argv)
    filled: list[str] = []
    for word in words:
        if word == "{args}":
            filled += arguments
        else:
            text = word.replace("{model}", model).replace("{port}", str(port))
            filled.append(text.replace("{args}", shlex.join(argv)))
    return filled
