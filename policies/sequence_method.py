"""The contract of methods that choose over all layers at once, after reading the prompt anew.

The engine holds the whole prompt in full precision, runs the model over each scoring pass, which
sees the prompt and its own tokens and is not stored, and then asks for all choices together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtune.policies.eviction import Evictor
from kvtune.policies.method import TokenMethod

if TYPE_CHECKING:
    from torch import Tensor

Encode = Callable[[str], list[int]]
"""Turns a text into token ids, without any special tokens of its own."""


class SequenceMethod(TokenMethod):
    """Drops tokens of a prompt by comparing all layers and heads of its sequence."""

    scope = "sequence"

    @abstractmethod
    def scoring_passes(
        self, prompt_ids: Sequence[int], encode: Encode | None, answer_ids: Sequence[int]
    ) -> list[list[int]]:
        """Return the token ids of each extra pass; none if nothing will be dropped.

        `encode` is None where there is no tokenizer; `answer_ids` open an answer in the model's
        chat format, empty if it has none.
        """

    @abstractmethod
    def select_all(self, evictors: Sequence[Evictor]) -> list[Tensor | list[Tensor] | None]:
        """Return what each layer keeps, from its evictor, which then forgets its scores.

        Indices [1 or Hk, m] into the prompt, a list of one [m] a KV head, or None for everything.
        """
