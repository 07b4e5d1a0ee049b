"""Evictions that compare all layers of a sequence: scoring passes, then all choices together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.engines.reference.step import store_prompt
from kvtune.policies.sequence_method import Encode, SequenceMethod

if TYPE_CHECKING:
    from kvtune.engines.reference.engine import ReferenceEngine

MARK = "kvtune"


def evict_whole_sequence(
    engine: ReferenceEngine, sequence: CachedSequence, prompt: Sequence[int]
) -> None:
    """Compress a prompt that all layers hold in full precision, and store it.

    A later prompt of the same sequence is stored whole.
    """
    layers = [layer for layer in sequence.layers if layer.stack.evictors]
    kept: list[Tensor | list[Tensor] | None] = [None] * len(layers)
    number, method = _chooser(sequence)
    if not any(layer.tokens for layer in layers):
        encode = _encoder(engine.tokenizer)
        answer_ids = _answer_ids(engine.tokenizer, encode)
        for token_ids in method.scoring_passes(prompt, encode, answer_ids):
            engine.score(sequence, token_ids)
        sequence.note_peak()
        kept = method.select_all([layer.evictors[number] for layer in layers])
    for layer, index in zip(layers, kept, strict=True):
        store_prompt(sequence, layer, index)


def _chooser(sequence: CachedSequence) -> tuple[int, SequenceMethod]:
    """The method that compares all layers, and which of the stack's evictors it is."""
    return next(
        (number, method)
        for number, method in enumerate(sequence.stack.evictors)
        if isinstance(method, SequenceMethod)
    )


def _encoder(tokenizer: Any) -> Encode | None:
    if tokenizer is None:
        return None
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def _answer_ids(tokenizer: Any, encode: Encode | None) -> list[int]:
    """What stands between a user's text and the model's answer in the chat format."""
    if encode is None or getattr(tokenizer, "chat_template", None) is None:
        return []
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    return encode(chat.rpartition(MARK)[2])
