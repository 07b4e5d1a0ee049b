"""Turn requests that are only lengths and block ids into token ids that share what they should.

Tokens come from SHAKE-128 of a name ("this salt, this block" or "this salt, this request"), so they
are the same on every machine, and a new salt gives a run that no cache has seen.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtune.errors import BadInput
from kvtune.types import Request

CACHED_TOKENS = 4_000_000
MIN_VOCAB_SIZE = 16


@dataclass(frozen=True, slots=True)
class Materialized:
    """Requests ready to be sent, and how many of them the model's context changed.

    `clipped` requests lost the end of their prompt; `dropped` ones are gone, because their output
    alone fills the context.
    """

    requests: tuple[Request, ...]
    clipped: int
    dropped: int


def materialize(
    requests: Iterable[Request],
    *,
    vocab_size: int,
    max_model_len_tokens: int | None,
    salt: int,
    default_output_tokens: int,
) -> Materialized:
    """Give token ids to the requests that have only a length; pass the others through unchanged.

    Blocks of equal id become equal tokens and blocks of different ids different ones; what follows
    the blocks is unlike any other request. Everything changes with `salt`. Token ids come from the
    middle three quarters of the vocabulary, because special tokens stand at its ends.

    A prompt is clipped so that it fits into `max_model_len_tokens` (`None`: no limit) with its
    output, which is `default_output_tokens` where the request does not say.

    Raises:
        BadInput: the vocabulary is too small to tell blocks apart, or a number is below 1.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise BadInput(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    for name, value in (
        ("default_output_tokens", default_output_tokens),
        ("max_model_len_tokens", max_model_len_tokens),
    ):
        if value is not None and value < 1:
            raise BadInput(f"{name} must be at least 1, got {value}")
    tokens = _Tokens(vocab_size, salt)
    ready: list[Request] = []
    clipped = dropped = 0
    for index, request in enumerate(requests):
        if request.input_tokens is None:
            ready.append(request)
            continue
        if not fits(
            request,
            max_model_len_tokens=max_model_len_tokens,
            default_output_tokens=default_output_tokens,
        ):
            dropped += 1
            continue
        output_tokens = request.output_tokens or default_output_tokens
        input_tokens = request.input_tokens
        if max_model_len_tokens is not None:
            input_tokens = min(input_tokens, max_model_len_tokens - output_tokens)
        clipped += input_tokens < request.input_tokens
        ready.append(
            replace(
                request,
                token_ids=tokens.prompt(request, index, input_tokens),
                input_tokens=None,
                output_tokens=output_tokens,
                prefix_blocks=(),
                prefix_block_tokens=0,
            )
        )
    return Materialized(tuple(ready), clipped, dropped)


def fits(request: Request, *, max_model_len_tokens: int | None, default_output_tokens: int) -> bool:
    """Whether `materialize` keeps a request: one that is only a length must leave room for it."""
    if request.input_tokens is None:
        return True
    output_tokens = request.output_tokens or default_output_tokens
    return request.input_tokens > 0 and (
        max_model_len_tokens is None or output_tokens < max_model_len_tokens
    )


class _Tokens:
    """Expands names into token ids; the ids are shared integers, to spare memory."""

    def __init__(self, vocab_size: int, salt: int) -> None:
        margin = vocab_size // 8
        self._ids = list(range(margin, vocab_size - margin))
        self._salt = salt
        self._blocks: dict[tuple[int, int], tuple[int, ...]] = {}
        self._cached_tokens = 0

    def prompt(self, request: Request, index: int, length: int) -> tuple[int, ...]:
        prompt: list[int] = []
        for block in request.prefix_blocks:
            if len(prompt) >= length:
                break
            prompt += self._block(block, request.prefix_block_tokens)
        # The last block may be partial: the prompt ends inside it.
        del prompt[length:]
        if len(prompt) < length:
            prompt += self._expand(f"request {index}", length - len(prompt))
        return tuple(prompt)

    def _block(self, block: int, block_tokens: int) -> tuple[int, ...]:
        expanded = self._blocks.get((block, block_tokens))
        if expanded is None:
            if self._cached_tokens > CACHED_TOKENS:
                self._blocks.clear()
                self._cached_tokens = 0
            expanded = tuple(self._expand(f"block {block_tokens} {block}", block_tokens))
            self._blocks[block, block_tokens] = expanded
            self._cached_tokens += block_tokens
        return expanded

    def _expand(self, name: str, length: int) -> list[int]:
        digest = hashlib.shake_128(f"{self._salt} {name}".encode()).digest(4 * length)
        ids = self._ids
        count = len(ids)
        return [ids[number % count] for number in struct.unpack(f"<{length}I", digest)]
