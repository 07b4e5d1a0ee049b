"""Spans of a prompt that a request wants to stay, and how much of each kind of span did.

A request says them in its `kv_transfer_params`, which vLLM hands to a connector as they are:

    {"kvtune": {"protected_spans": [[0, 240], [512, 600]]}}

Uneven loss of a prompt's parts is what makes models forget instructions or tell them ("Pitfalls of
KV cache compression", arXiv 2510.00231), so it is counted by kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtune.errors import BadInput
from kvtune.policies.page_budget import Span

SECTION = "kvtune"
"""The key under a request's `kv_transfer_params`; everything else is others'."""

FIELD = "protected_spans"
MOST_SPANS = 256

KINDS = ("prefix", "marked", "rest")
"""A token is of the first kind that fits: the server's `protect.prefix_tokens`, spans, all else."""

_MOST_TOKENS = 1 << 31
_FIX = (
    f'give "{SECTION}": {{"{FIELD}": [[start, end], ...]}} with 0 <= start < end, '
    f"in tokens of the prompt, at most {MOST_SPANS} of them"
)


def protected_spans(kv_transfer_params: object, prompt_tokens: int) -> tuple[Span, ...] | None:
    """The spans that a request with such a prompt marks; None where it says nothing to kvtune.

    A client may send anything, of any size, and all requests wait for this: the first mistake ends
    it, and messages repeat no more of it than two places.

    Raises:
        BadInput: they are not pairs of places, or not within the prompt.
    """
    if not isinstance(kv_transfer_params, Mapping) or SECTION not in kv_transfer_params:
        return None
    section = kv_transfer_params[SECTION]
    if not isinstance(section, Mapping) or not section.keys() <= {FIELD}:
        raise _bad(f"{SECTION} takes an object with {FIELD} and nothing else")
    spans = section.get(FIELD, ())
    if not isinstance(spans, list | tuple) or len(spans) > MOST_SPANS:
        raise _bad(f"{SECTION}.{FIELD} takes a list of at most {MOST_SPANS} spans")
    return tuple(_span(number, span, prompt_tokens) for number, span in enumerate(spans))


def _span(number: int, span: object, prompt_tokens: int) -> Span:
    if not isinstance(span, list | tuple) or len(span) != 2 or not all(map(_is_place, span)):
        raise _bad(f"{SECTION}.{FIELD}.{number} is no pair of places")
    start, end = span
    if not start < end <= prompt_tokens:
        raise BadInput(
            f"protected span [{start}, {end}) is not within the prompt, "
            f"which has {prompt_tokens} tokens",
            fix=_FIX,
        )
    return start, end


def _is_place(number: object) -> bool:
    """Whether it is a whole number (to Python, True is one too) within the longest of prompts."""
    return type(number) is int and 0 <= number < _MOST_TOKENS


def _bad(why: str) -> BadInput:
    return BadInput(f"kv_transfer_params cannot be used: {why}", fix=_FIX)


def kept_by_kind(
    prompt_tokens: int, prefix_tokens: int, marked: Sequence[Span], gone: Iterable[Span]
) -> dict[str, tuple[int, int]]:
    """How many tokens a prompt has of each kind, and how many of them are kept.

    Args:
        prompt_tokens: of the prompt.
        prefix_tokens: how many first tokens the server protects.
        marked: spans that the request marked.
        gone: spans whose KV was dropped.
    """
    kinds = range(len(KINDS))
    # A byte for each token: the engine waits for this whenever a request ends, and comparing spans
    # with each other would take it a second where thousands are gone.
    tokens = bytearray(prompt_tokens)
    _put(kinds[2], [(0, prompt_tokens)], tokens)
    _put(kinds[1], marked, tokens)
    _put(kinds[0], [(0, prefix_tokens)], tokens)
    seen = [tokens.count(kind) for kind in kinds]
    _put(len(KINDS), gone, tokens)
    return {name: (seen[kind], tokens.count(kind)) for kind, name in enumerate(KINDS)}


def _put(kind: int, spans: Iterable[Span], tokens: bytearray) -> None:
    """Say of all tokens of `spans` that they are of a kind."""
    for start, end in spans:
        tokens[start:end] = bytes([kind]) * (min(end, len(tokens)) - start)
