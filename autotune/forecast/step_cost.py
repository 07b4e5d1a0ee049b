"""What a step of the engine costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtune.engines.simulated.scheduler import Step, is_decode


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step: a fixed part, and parts for what it does.

    `per_sequence_s` is for each sequence that decodes one token, `per_kv_token_s` for each token in
    the cache of each sequence of the step, `per_prefill_token_s` for each prompt token computed; a
    token computed again after a preemption counts as one. A sequence that decodes reads a cached
    token in `read_ratio` of that time.
    """

    fixed_s: float
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_prefill_token_s: float = 0.0
    read_ratio: float = 1.0

    def duration_s(self, step: Step) -> float:
        """Seconds that a step takes, asked before it is completed."""
        decoding = read = prefill = resident = 0
        for sequence, tokens in step.chunks:
            if is_decode(sequence, tokens):
                decoding += 1
                read += sequence.computed_tokens + tokens
            else:
                prefill += tokens
                resident += sequence.computed_tokens + tokens
        return (
            self.fixed_s
            + decoding * self.per_sequence_s
            + (read * self.read_ratio + resident) * self.per_kv_token_s
            + prefill * self.per_prefill_token_s
        )

    def slower(self, factor: float) -> StepCost:
        """Steps that only decode take `factor` times as long; a prompt token costs the same."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            per_sequence_s=self.per_sequence_s * factor,
            per_kv_token_s=self.per_kv_token_s * factor,
        )
