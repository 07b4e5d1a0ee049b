"""Mooncake traces: lengths and hash ids of prompt blocks, so that prefixes are really shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from kvtune.profilers.traces.base import Arrivals, TraceFormat, first_keys, json_rows
from kvtune.types import Request

BLOCK_TOKENS = 512
SESSION_BLOCK_TOKENS = 16


class Mooncake(TraceFormat):
    """JSON Lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

    An id names a block of 512 tokens; the last block of a prompt may be partial.

    Lines that also have `session` and `turn` are of the agent variant: ids name full blocks of 16
    tokens, and `timestamp` counts from the start of the session. When a session began is not
    recorded, so those requests have no arrival time; their session is the conversation.

    A request of 0 input or output tokens cannot be replayed: it is skipped and counted.
    """

    name = "mooncake"
    title = "Mooncake JSON Lines (lengths and block hashes)"
    keys: ClassVar = frozenset({"input_length", "output_length", "hash_ids"})

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether the first line has the keys of a Mooncake record."""
        return cls.keys <= first_keys(head)

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the requests."""
        arrivals = Arrivals()
        for row in json_rows(path):
            in_session = "session" in row.fields and "turn" in row.fields
            block_tokens = SESSION_BLOCK_TOKENS if in_session else BLOCK_TOKENS
            input_tokens = row.whole("input_length")
            output_tokens = row.whole("output_length")
            time_s = row.number("timestamp") / 1000
            if not input_tokens or not output_tokens:
                skipped["requests without input or output tokens"] += 1
                continue
            yield Request(
                arrival_s=None if in_session else arrivals.since_first_s(time_s, row),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                prefix_blocks=row.blocks("hash_ids", block_tokens, input_tokens),
                prefix_block_tokens=block_tokens,
                conversation=str(row.fields["session"]) if in_session else None,
            )
