"""What the simulated model says: deterministic words, and facts it can find in the prompt.

It is a model that can only look back. If the last words of a prompt stand earlier in it, the answer
goes on as the text did there, to the end of the sentence; otherwise it makes up words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

VOCABULARY = 49_152
BYTES_PER_TOKEN = 4
_LOOKED_UP_WORDS = 3
_GARBAGE = " rursrsIner"


def tokenize(text: str) -> list[int]:
    """Stand-in token ids: one for every four bytes."""
    raw = text.encode()
    return [
        int.from_bytes(raw[at : at + BYTES_PER_TOKEN], "big")
        for at in range(0, len(raw), BYTES_PER_TOKEN)
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of `natural_tokens` tokens, one a word, if it is not cut short or forced on."""

    words: tuple[str, ...]
    seed: int
    natural_tokens: int
    is_broken: bool = False

    def token(self, index: int) -> str:
        """The text of a token."""
        if self.is_broken:
            return _GARBAGE
        if index < len(self.words):
            return f" {self.words[index]}"
        return f" w{(self.seed + index * 2_654_435_761) % 9973}"


def answer_to(text: str | None, tokens: list[int], *, broken: bool) -> Answer:
    """The answer to a prompt given as `text` (if it came as text) and tokens."""
    digest = hashlib.sha256(repr(tokens).encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    words = _continuation(text) if text is not None else ()
    return Answer(words, seed, len(words) or 16 + seed % 240, broken)


def _continuation(text: str) -> tuple[str, ...]:
    words = text.split()
    key = words[-_LOOKED_UP_WORDS:]
    if len(key) < _LOOKED_UP_WORDS:
        return ()
    for end in range(len(words) - 1, _LOOKED_UP_WORDS - 1, -1):
        if words[end - _LOOKED_UP_WORDS : end] == key:
            rest = words[end:-_LOOKED_UP_WORDS] or words[end:]
            stop = next(
                (at for at, word in enumerate(rest) if word.endswith((".", "?", "!"))), None
            )
            return tuple(rest if stop is None else rest[: stop + 1])
    return ()
