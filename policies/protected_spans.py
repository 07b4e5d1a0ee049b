"""Spans of a prompt that a request wants to stay, and how much of each kind of span did.

A request says them in its `kv_transfer_params`, which vLLM hands to a connector as they are:

    {"kvtune": {"protected_spans": [[0, 240], [512, 600]]}}

Uneven loss of a prompt's parts is what makes models forget instructions or tell them ("Pitfalls of
KV cache compression", arXiv 2510.00231), so it is counted by kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtune.errors import BadInput
from kvtune.policies.page_budget import Span

SECTION = "kvtune"
"""The key under a request's `kv_transfer_params`; everything else is others'."""

MOST_SPANS = 256

KINDS = ("prefix", "marked", "rest")
"""A token is of the first kind that fits: the server's `protect.prefix_tokens`, spans, all else."""

_Place = Annotated[int, Field(strict=True, ge=0)]


class _Marks(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    protected_spans: tuple[tuple[_Place, _Place], ...] = Field(default=(), max_length=MOST_SPANS)


def protected_spans(kv_transfer_params: object, prompt_tokens: int) -> tuple[Span, ...] | None:
    """The spans that a request with such a prompt marks; None where it says nothing to kvtune.

    Raises:
        BadInput: they are not pairs of places, or not within the prompt.
    """
    if not isinstance(kv_transfer_params, Mapping) or SECTION not in kv_transfer_params:
        return None
    try:
        spans = _Marks.model_validate(kv_transfer_params[SECTION]).protected_spans
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(str(part) for part in (SECTION, *each['loc']))}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise BadInput(f"kv_transfer_params cannot be used: {told}", fix=_FIX) from error
    for start, end in spans:
        if not start < end <= prompt_tokens:
            raise BadInput(
                f"protected span [{start}, {end}) is not within the prompt, "
                f"which has {prompt_tokens} tokens",
                fix=_FIX,
            )
    return spans


_FIX = (
    f'give "{SECTION}": {{"protected_spans": [[start, end], ...]}} with 0 <= start < end, '
    f"in tokens of the prompt, at most {MOST_SPANS} of them"
)


def kept_by_kind(
    prompt_tokens: int, prefix_tokens: int, marked: Sequence[Span], gone: Iterable[Span]
) -> dict[str, tuple[int, int]]:
    """How many tokens a prompt has of each kind, and how many of them are kept.

    Args:
        prompt_tokens: of the prompt.
        prefix_tokens: how many first tokens the server protects.
        marked: spans that the request marked.
        gone: spans that do not overlap, whose KV was dropped.
    """
    lost = list(gone)
    cuts = {0, prefix_tokens, prompt_tokens}.union(*marked, *lost)
    told = dict.fromkeys(KINDS, (0, 0))
    for first, past in pairwise(sorted(cut for cut in cuts if cut <= prompt_tokens)):
        kind = "prefix" if first < prefix_tokens else "marked" if _in(first, marked) else "rest"
        seen, kept = told[kind]
        stays = 0 if _in(first, lost) else past - first
        told[kind] = seen + past - first, kept + stays
    return told


def _in(place: int, spans: Iterable[Span]) -> bool:
    return any(start <= place < end for start, end in spans)
