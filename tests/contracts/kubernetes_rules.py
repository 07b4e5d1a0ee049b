"""Kubernetes' rules, written independently of the emitters that have to obey them."""

import re

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ANNOTATION_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def expand(text: str) -> str:
    """What the kubelet makes of a word of `command`, `args` or `env` when no variable is known.

    `$$` becomes `$`, `$(NAME)` would be replaced (refused here), any other `$` stays.
    """
    result = []
    at = 0
    while at < len(text):
        following = text[at + 1 : at + 2]
        if text[at] != "$" or not following:
            result.append(text[at])
            at += 1
        elif following == "$":
            result.append("$")
            at += 2
        else:
            name = re.match(r"\([^)]*\)", text[at + 1 :], re.S)
            assert name is None, f"Kubernetes would replace a variable in {text!r}"
            result.append("$" + following)
            at += 2
    return "".join(result)


def check_label(name: str) -> None:
    """A DNS-1123 label that YAML reads as a string."""
    assert _LABEL.fullmatch(name), name
    assert not name[0].isdigit()


def check_annotations(annotations: dict[str, str]) -> None:
    """Keys of the right form, and values that are strings of a modest size."""
    assert annotations
    for key, value in annotations.items():
        assert _ANNOTATION_KEY.fullmatch(key), key
        assert isinstance(value, str)
        assert len(value) <= 200
        assert "\n" not in value


def plain_environment(entries: list[dict[str, object]]) -> dict[str, str]:
    """Name to value of the entries that are written down; the others read a Secret."""
    plain = {}
    for entry in entries:
        if "value" in entry:
            plain[str(entry["name"])] = expand(str(entry["value"]))
        else:
            reference = entry["valueFrom"]
            assert isinstance(reference, dict)
            assert reference["secretKeyRef"]["key"] == entry["name"]
    return plain
