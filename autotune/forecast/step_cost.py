"""What a step of the engine costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtune.autotune.forecast.sparse_reads import SparseReads
from kvtune.engines.simulated.scheduler import Step, is_decode


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step: a fixed part, and parts for what it does.

    `per_sequence_s` is for each sequence that decodes one token, `per_kv_token_s` for each token in
    the cache of each sequence of the step, `per_prefill_token_s` for each prompt token computed; a
    token computed again after a preemption counts as one. A sequence that decodes reads a cached
    token in `read_ratio` of that time, and one that computes a prompt in `prompt_read_ratio`.
    """

    fixed_s: float
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_prefill_token_s: float = 0.0
    read_ratio: float = 1.0
    prompt_read_ratio: float = 1.0

    def duration_s(
        self, step: Step, reads: SparseReads | None = None, saved_ratio: float = 1.0
    ) -> float:
        """Seconds that a step takes, asked before it is completed.

        Args:
            step: what is computed.
            reads: what is read of a cache, where that is not all of it.
            saved_ratio: the part of the time for what is not read that is really saved.
        """
        decoding = prefill = resident = 0
        read = 0.0
        for sequence, tokens in step.chunks:
            cached = sequence.computed_tokens
            if is_decode(sequence, tokens):
                decoding += 1
                read += cached + tokens
                if reads is not None:
                    left = reads.decoded(cached, sequence.prompt_tokens)
                    read -= saved_ratio * (cached + tokens - left)
            else:
                prefill += tokens
                resident += (
                    cached + tokens
                    if reads is None
                    else reads.kept(cached, tokens, sequence.prompt_tokens)
                )
        return (
            self.fixed_s
            + decoding * self.per_sequence_s
            + (read * self.read_ratio + resident * self.prompt_read_ratio) * self.per_kv_token_s
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
