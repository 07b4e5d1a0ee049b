"""Run a prompt through the model once, and compress it with many stacks.

With an exact prefill, queries, keys and values of a prompt are the same under every stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.sequence import Sequence as CachedSequence
from kvtune.engines.reference.step import finish


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, what each layer attended with ([H, n, d] after RoPE), and the last logits [V]."""

    prompt: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor, Tensor], ...]
    logits: Tensor


def record(engine: ReferenceEngine, prompt: Sequence[int]) -> Recording:
    """Process a prompt with the full cache and keep what its layers saw."""
    sequence = engine.start()
    sequence.recording = []
    (logits,) = engine.prefill([sequence], [prompt])
    return Recording(tuple(prompt), tuple(sequence.recording), logits)


@torch.inference_mode()
def replay(engine: ReferenceEngine, sequence: CachedSequence, recording: Recording) -> None:
    """Bring an empty sequence to the state after the recorded prompt, without the model."""
    positions = torch.arange(len(recording.prompt), device=engine.device)
    for number, (queries, keys, values) in enumerate(recording.layers):
        seen = sequence.layers[number].show(queries, keys, values, positions)
        finish(sequence, number, seen)
    sequence.seen_tokens = len(recording.prompt)
    engine.finish_prompt(sequence, recording.prompt)
