"""Chats as prompts: which tokens are whose, and which must be kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.eviction import Span


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's token ids, and its spans: one a message, and those that the user marked."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    protected_roles: Collection[str] = ("system",),
    protected_texts: Sequence[str] = (),
) -> ChatPrompt:
    """Apply the model's chat template, ready for an answer, and say where each message stands.

    A message's span is what its content became, without the template's own words around it.
    `protected_texts` are parts of the chat that must be kept too; each becomes a span of its own,
    in front of those of the messages.

    Raises:
        BadInput: the tokenizer has no chat template or cannot tell where tokens come from, or a
            text or message is not found in the chat.
    """
    if not getattr(tokenizer, "chat_template", None) or not getattr(tokenizer, "is_fast", False):
        raise BadInput(
            "this tokenizer has no chat template, or is not a fast one",
            fix="give token ids and spans yourself",
        )
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets: list[tuple[int, int]] = read["offset_mapping"]
    spans, after = [], 0
    for message in messages:
        content = message["content"].strip()
        start = _find(text, content, after)
        after = start + len(content)
        role = message["role"]
        spans.append(_span(offsets, start, after, role, role in protected_roles))
    marked = []
    for part in protected_texts:
        start = _find(text, part, 0)
        marked.append(_span(offsets, start, start + len(part), "marked", True))
    return ChatPrompt(tuple(read["input_ids"]), (*marked, *spans))


def text_prompt(tokenizer: Any, text: str, *, protected_texts: Sequence[str] = ()) -> ChatPrompt:
    """Read a text that is no chat, and say where its `protected_texts` stand.

    Raises:
        BadInput: the tokenizer cannot tell where tokens come from, or a text is not found.
    """
    if not protected_texts:
        return ChatPrompt(tuple(tokenizer(text)["input_ids"]), ())
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput("this tokenizer is not a fast one", fix="give token ids and spans yourself")
    read = tokenizer(text, return_offsets_mapping=True)
    starts = [(part, _find(text, part, 0)) for part in protected_texts]
    return ChatPrompt(
        tuple(read["input_ids"]),
        tuple(
            _span(read["offset_mapping"], start, start + len(part), "marked", True)
            for part, start in starts
        ),
    )


def _find(text: str, part: str, after: int) -> int:
    start = text.find(part, after)
    if start < 0 or not part:
        raise BadInput(
            f"{part[:60]!r} is not in the chat or text as the model gets it",
            fix="give the text exactly as it stands there",
        )
    return start


def _span(
    offsets: Sequence[tuple[int, int]], start: int, end: int, label: str, protected: bool
) -> Span:
    """The tokens that share a character with [start, end)."""
    inside = [n for n, (low, high) in enumerate(offsets) if low < end and high > start]
    return Span(inside[0], inside[-1] + 1, label, protected)
