"""kvtune's own format, JSON Lines of prompts; vLLM's custom dataset is a subset of it."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from kvtune.profilers.traces.base import Arrivals, Row, TraceFormat, first_keys, json_rows
from kvtune.types import Request


class PromptsJsonl(TraceFormat):
    """One JSON object a line, with exactly one of these keys to say what is sent.

    - `prompt`: text
    - `messages`: a chat, as a list of objects with `role`
    - `token_ids`: token ids
    - `input_tokens`: only a length; optionally `prefix_blocks`, hash ids of consecutive blocks of
      `prefix_block_tokens` tokens from the start of the prompt (equal ids mean equal tokens)

    Optional: `output_tokens`, `arrival_s` (on all lines or on none) and `conversation`. Other keys
    are ignored, unless one looks like a misspelt key of this format.
    """

    name = "prompts_jsonl"
    title = "JSON Lines of prompts, chats, token ids or lengths"
    inputs: ClassVar = ("prompt", "messages", "token_ids", "input_tokens")
    keys: ClassVar = frozenset(
        {
            *inputs,
            *("output_tokens", "arrival_s", "prefix_blocks", "prefix_block_tokens", "conversation"),
        }
    )

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether the first line has a key that says what is sent."""
        return not first_keys(head).isdisjoint(cls.inputs)

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the requests."""
        arrivals = Arrivals()
        timed: bool | None = None
        for row in json_rows(path):
            cls._check_keys(row)
            if timed is None:
                timed = "arrival_s" in row.fields
            if timed != ("arrival_s" in row.fields):
                row.fail("'arrival_s' must be on all lines or on none")
            yield Request(
                arrival_s=arrivals.since_first_s(row.number("arrival_s"), row) if timed else None,
                output_tokens=(
                    row.whole("output_tokens", minimum=1) if "output_tokens" in row.fields else None
                ),
                conversation=_conversation(row),
                **_content(row),
            )

    @classmethod
    def _check_keys(cls, row: Row) -> None:
        given = [key for key in cls.inputs if key in row.fields]
        if len(given) != 1:
            row.fail(
                f"exactly one of {', '.join(map(repr, cls.inputs))} is needed, "
                f"got {' and '.join(map(repr, given)) or 'none'}"
            )
        if "prefix_blocks" in row.fields and given != ["input_tokens"]:
            row.fail(f"'prefix_blocks' goes with 'input_tokens', not with {given[0]!r}")
        for key in row.fields.keys() - cls.keys:
            if meant := _nearest_key(key):
                row.fail(f"there is no key {key!r}", f"Did you mean {meant!r}?")


def format_line(request: Request) -> str:
    """The line of this format, without a line end, that reads back as `request`."""
    line: dict[str, Any] = {}
    for key in sorted(PromptsJsonl.keys):
        value = getattr(request, key)
        if value is not None and not key.startswith("prefix_"):
            line[key] = value
    if request.prefix_block_tokens:
        line["prefix_blocks"] = request.prefix_blocks
        line["prefix_block_tokens"] = request.prefix_block_tokens
    return json.dumps(line)


@lru_cache(maxsize=256)
def _nearest_key(key: str) -> str | None:
    return next(iter(difflib.get_close_matches(key, sorted(PromptsJsonl.keys), 1, 0.85)), None)


def _conversation(row: Row) -> str | None:
    value = row.fields.get("conversation")
    if value is not None and type(value) not in (str, int):
        row.fail(f"'conversation' must be text or a whole number, got {value!r}")
    return None if value is None else str(value)


def _content(row: Row) -> dict[str, Any]:
    if "prompt" in row.fields:
        return {"prompt": row.text("prompt")}
    if "messages" in row.fields:
        return {"messages": _messages(row)}
    if "token_ids" in row.fields:
        if not (ids := row.ids("token_ids")):
            row.fail("'token_ids' is empty")
        return {"token_ids": ids}
    content: dict[str, Any] = {"input_tokens": row.whole("input_tokens", minimum=1)}
    if "prefix_blocks" in row.fields:
        block_tokens = row.whole("prefix_block_tokens", minimum=1)
        content["prefix_blocks"] = row.blocks(
            "prefix_blocks", block_tokens, content["input_tokens"]
        )
        content["prefix_block_tokens"] = block_tokens
    return content


def _messages(row: Row) -> tuple[dict[str, Any], ...]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        row.fail("'messages' must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            row.fail("each of 'messages' must be an object with a 'role'")
    return tuple(messages)
