"""From a request of a workload to the bytes that are sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.types import Request

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to send: `body` is JSON that asks for a stream with a final usage message.

    `arrival_s` is when the workload has it arrive; `input_tokens` and `output_tokens` are what is
    known beforehand (`None` where the server will have to say).
    """

    path: str
    body: bytes
    arrival_s: float | None
    input_tokens: int | None
    output_tokens: int | None


def prepare(
    request: Request,
    *,
    model: str,
    index: int,
    fixed_length: bool,
    output_tokens: int,
    cache_salt: str | None,
    temperature: float = 0.0,
) -> PreparedRequest:
    """Make the bytes of `request`, asking `model` for `output_tokens` tokens.

    `fixed_length` forces exactly that many (end-of-sequence tokens are ignored); otherwise it is
    the most, and the model may stop earlier. Requests of one run share `cache_salt`, so that they
    hit each other's prefixes but none that an earlier run left in the cache.

    Raises:
        BadInput: the request has no text, messages or token ids, or `output_tokens` is below 1;
            `index` names it in the message.
    """
    if output_tokens < 1:
        raise BadInput(
            f"request {index} asks for {output_tokens} output tokens, at least 1 is needed",
            fix="give every request a positive output length",
        )
    path, content = _content(request, index)
    body: dict[str, Any] = {
        "model": model,
        **content,
        "max_tokens": output_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if fixed_length:
        body |= {"min_tokens": output_tokens, "ignore_eos": True}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return PreparedRequest(
        path=path,
        body=json.dumps(body, separators=(",", ":"), default=dict).encode(),
        arrival_s=request.arrival_s,
        input_tokens=request.input_tokens if request.token_ids is None else len(request.token_ids),
        output_tokens=output_tokens,
    )


def _content(request: Request, index: int) -> tuple[str, dict[str, Any]]:
    if request.messages is not None:
        return CHAT_PATH, {"messages": list(request.messages)}
    if request.token_ids is not None:
        return COMPLETIONS_PATH, {"prompt": list(request.token_ids)}
    if request.prompt is not None:
        return COMPLETIONS_PATH, {"prompt": request.prompt}
    raise BadInput(
        f"request {index} has a length but nothing to send",
        fix="materialize the workload first: lengths have to become token ids",
    )
