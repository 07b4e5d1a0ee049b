"""Read the answer to one request as it arrives: token times, usage, and what went wrong.

Only messages that may say something new are decoded as JSON; a message that carries
`"finish_reason":null` after the first token is one more token and is only timed.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtune.profilers.load.request import PreparedRequest
from kvtune.profilers.load.sse import EventSplitter
from kvtune.types import RequestRecord

EXCERPT_CHARACTERS = 300
_KEPT_ERROR_BYTES = 16 * 1024
# Quotes inside a JSON string are escaped, so generated text cannot contain these.
_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_GENERATED = (
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
    "refusal",
)
_TEXTS = ("content", "reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class KeptText:
    """Which answers keep their text, and how much of it from its start.

    `indexes` are those of the requests, `None` for all; `messages` are those of the stream. Kept is
    what came in as it came in, some 350 bytes a message, and read when the replay is over.
    """

    indexes: Collection[int] | None = None
    messages: int = sys.maxsize

    def messages_of(self, index: int) -> int:
        """How many messages the answer to a request keeps."""
        return self.messages if self.indexes is None or index in self.indexes else 0


class Answer:
    """The answer to one request; a `Receiver` of `http`. Times are `time.perf_counter` seconds.

    A message with choices is one token, also when its text is empty (held back until a character
    is whole). The chat message that only announces the role is none, nor is a closing message
    without text when the server counts one token fewer than there were messages.

    The text of the first `kept_messages` messages is in the record; none at all with 0.
    """

    __slots__ = (
        "_ends_empty",
        "_events",
        "_excerpt",
        "_finished",
        "_keeps_text",
        "_room",
        "_texts",
        "_unfinished",
        "cached_tokens",
        "end_s",
        "error",
        "finish_reason",
        "input_tokens",
        "output_tokens",
        "sent_s",
        "status",
        "token_times_s",
    )

    def __init__(self, kept_messages: int = 0) -> None:
        self._events = EventSplitter()
        self._excerpt = b""
        self._finished = False
        self._ends_empty = False
        self._unfinished: bytes | None = None
        self._keeps_text = kept_messages > 0
        self._room = kept_messages
        self._texts: list[bytes] = []
        self.status = 0
        self.token_times_s: array[float] = array("d")
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    def sent(self, now_s: float) -> None:
        """Note that the request is being written."""
        self.sent_s = now_s

    def head(self, status: int) -> None:
        """Note the status of the response."""
        self.status = status

    def body(self, data: bytes, now_s: float) -> None:
        """Read the next bytes of the response."""
        if self.status != 200:
            if len(self._excerpt) < _KEPT_ERROR_BYTES:
                self._excerpt += data
            return
        try:
            messages = self._events.feed(data)
        except ValueError as error:
            self._problem(f"malformed stream: {error}")
            return
        unfinished = self._unfinished
        for message in messages:
            if unfinished is not None and unfinished in message and message.endswith(b"}"):
                self.token_times_s.append(now_s)
                if self._room:
                    self._room -= 1
                    self._texts.append(message)
            else:
                self._read(message, now_s)
                unfinished = self._unfinished

    def end(self, error: str | None, now_s: float) -> None:
        """Note that nothing more comes, and why if that is not because the answer is complete."""
        if self.end_s is not None:
            return
        if error is None and (rest := self._events.finish()) is not None:
            self._read(rest, now_s)
        self._settle_closing_message()
        self.error = None if self._finished and self.error is None else self._reason(error)
        if self.error is None and not self.token_times_s:
            self.error = "empty answer: the stream ended without a token"
        self.end_s = self.token_times_s[-1] if self.error is None else now_s

    def record(
        self, request: PreparedRequest, *, index: int, scheduled_s: float, start_s: float
    ) -> RequestRecord:
        """Summarise an ended answer, with times relative to `start_s`.

        A completed request ends with its last token, a failed one when it failed.
        """
        times = self.token_times_s
        end_s = start_s if self.end_s is None else self.end_s
        usage = self.output_tokens
        return RequestRecord(
            index=index,
            scheduled_s=scheduled_s,
            sent_s=(end_s if self.sent_s is None else self.sent_s) - start_s,
            first_token_s=times[0] - start_s if times else None,
            end_s=end_s - start_s,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            input_tokens=request.input_tokens if self.input_tokens is None else self.input_tokens,
            output_tokens=len(times) if usage is None else usage,
            requested_output_tokens=request.output_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            error=self.error,
            text=_whole("".join(map(_text, self._texts))) if self._keeps_text else None,
        )

    def _read(self, message: bytes, now_s: float) -> None:
        if message == b"[DONE]":
            self._finished = True
            return
        try:
            payload = json.loads(message)
        except (ValueError, RecursionError):
            payload = None
        if not isinstance(payload, dict):
            self._problem(f"malformed stream: {_shorten(message)}")
            return
        if error := payload.get("error"):
            self._problem(f"server error: {_error_text(error)}")
        if isinstance(usage := payload.get("usage"), dict):
            self._read_usage(usage)
        choices = payload.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._read_choice(choices[0], message, now_s)

    def _read_usage(self, usage: dict[str, Any]) -> None:
        self.input_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"))

    def _read_choice(self, choice: dict[str, Any], message: bytes, now_s: float) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            generated = any(delta.get(field) for field in _GENERATED)
            announces = "role" in delta and not self.token_times_s
        else:
            generated, announces = bool(choice.get("text")), False
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
            self._ends_empty = not generated
        elif announces and not generated:
            return
        self.token_times_s.append(now_s)
        self._unfinished = next((mark for mark in _UNFINISHED if mark in message), self._unfinished)
        if self._room:
            self._room -= 1
            self._texts.append(message)

    def _settle_closing_message(self) -> None:
        """Some servers close with a message that carries no token: the usage tells."""
        if self._ends_empty and self.output_tokens == len(self.token_times_s) - 1:
            self.token_times_s.pop()

    def _problem(self, reason: str) -> None:
        self.error = self.error or reason

    def _reason(self, transport_error: str | None) -> str:
        if self.status not in (0, 200):
            return f"HTTP {self.status}: {_body_text(self._excerpt)}"
        return self.error or transport_error or "incomplete: the stream ended without [DONE]"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _shorten(raw: bytes | str) -> str:
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "..."


def _error_text(error: object) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _shorten(error["message"])
    return _shorten(error if isinstance(error, str) else json.dumps(error))


def _body_text(body: bytes) -> str:
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return _shorten(body) or "no body"
    if isinstance(payload, dict):
        return _error_text(payload.get("error") or payload.get("detail") or payload)
    return _shorten(body)


def _text(message: bytes) -> str:
    try:
        choice = json.loads(message)["choices"][0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    if not isinstance(choice, dict):
        return ""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return "".join(text for field in _TEXTS if isinstance(text := delta.get(field), str))
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _whole(text: str) -> str:
    """Put characters together whose halves came in two messages; a half alone is unreadable."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
