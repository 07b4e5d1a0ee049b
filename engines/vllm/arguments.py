"""Engine arguments as a mapping, and as words of a command line.

Names are vLLM's long option names without dashes. `True` and `False` become `--name` and
`--no-name`, a list its values after the name, a mapping JSON, and `None` is left out. An option
that is a mapping may be given in parts, `option.key.key`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.policies.plugin_arguments import whole

# Options of vLLM 0.32's parser whose only false form is to leave them out.
_WITHOUT_NEGATION = frozenset(
    {
        "aggregate-engine-logging",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "grpc",
        "headless",
    }
)
_NAME = re.compile(r"[a-zA-Z][\w-]*(\.[\w.+-]+)?")


def normal_name(name: str) -> str:
    """Spell an option name as vLLM does: no leading dashes, no underscores before a dot."""
    head, dot, tail = name.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + tail


def folded(arguments: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The same, with options whole where vLLM 0.32 would not understand their parts.

    It forgets a whole mapping where it also meets parts of it, in whatever order and place. A part
    that is a switch or a list crashes its parser on a command line, a false one is lost in a config
    file; numbers and text are understood everywhere.
    """
    named = {normal_name(name): value for name, value in arguments.items()}
    broken = {
        name.partition(".")[0]
        for name, value in named.items()
        if "." in name and value is not None
        if isinstance(value, bool | list) or isinstance(named.get(name.partition(".")[0]), dict)
    }
    found: dict[str, JsonValue] = {}
    for name, value in arguments.items():
        head = normal_name(name).partition(".")[0]
        if head not in broken:
            found[name] = value
        elif head not in found:
            found[head] = whole(head, named)
    return found


def to_argv(arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return `arguments` as command-line words."""
    words: list[str] = []
    for name, value in folded(arguments).items():
        flag = f"--{normal_name(name)}"
        if value is None or (value is False and normal_name(name) in _WITHOUT_NEGATION):
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{normal_name(name)}")
        elif isinstance(value, list):
            words += [flag, *(_word(item) for item in value)]
        elif (word := _word(value)).startswith("-") and not _is_number(word):
            words.append(f"{flag}={word}")
        else:
            words += [flag, word]
    return words


def _word(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+|-\d*\.\d+", word) is not None


def parse_engine_args(text: str) -> dict[str, JsonValue]:
    """Read command-line words such as `--enforce-eager --max-model-len 2048` into a mapping.

    `--no-x` becomes false, a name without a value true, a name with several values or one that is
    repeated a list. Numbers and JSON are read as such; a dotted name is kept as it is.

    Raises:
        BadInput: a word that belongs to no option, or quotes that do not close.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"engine arguments cannot be read: {error}", "Close the quotes.") from error
    found: dict[str, list[list[str]]] = {}
    for word in words:
        if _is_flag(word):
            name, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            found.setdefault(normal_name(name), []).append(current)
        elif re.match(r"-[a-zA-Z]", word):
            raise BadInput(
                f"engine arguments hold the short option {word!r}",
                "Write the long name, e.g. --tensor-parallel-size instead of -tp.",
            )
        elif not found:
            raise BadInput(
                f"engine arguments start with {word!r}, which is not an option",
                "Write options as --name value; the model has a flag of its own.",
            )
        else:
            current.append(word)
    arguments: dict[str, JsonValue] = {}
    for name, occurrences in found.items():
        negated = name.removeprefix("no-")
        if negated != name and not any(occurrences):
            arguments[negated] = False
        else:
            arguments[name] = _value([word for values in occurrences for word in values])
    return arguments


def _is_flag(word: str) -> bool:
    return word.startswith("--") and _NAME.fullmatch(word[2:].partition("=")[0]) is not None


def _value(words: Sequence[str]) -> JsonValue:
    if not words:
        return True
    values = [_read(word) for word in words]
    return values[0] if len(values) == 1 else values


def _read(word: str) -> JsonValue:
    """Read a number or a JSON object or list; everything else is text, as vLLM gets text."""
    if re.fullmatch(r"-?(\d+|\d*\.\d+|\d+\.\d*)([eE][+-]?\d+)?|[\[{].*[\]}]", word, re.DOTALL):
        try:
            value: JsonValue = json.loads(word)
        except ValueError:
            return word
        return value
    return word
