"""How many tokens are computed in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, powers_of_two
from kvtune.policies.settings import base_settings
from kvtune.types import Choice, Harm

SMALLEST_TOKENS = 256
LARGEST_TOKENS = 8192


class MaxNumBatchedTokens(Policy):
    """Set the token budget of a step, which is also the chunk in which prompts are computed.

    A small budget keeps the gaps between tokens short while prompts arrive; a large one computes
    prompts in fewer steps.
    """

    name: ClassVar[str] = "max_num_batched_tokens"
    title: ClassVar[str] = "tokens in a step"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "interference"
    arguments: ClassVar[tuple[str, ...]] = ("max-num-batched-tokens",)

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer powers of two between the batch width and the longest sequence."""
        now = base_settings(ctx)
        stock = now.max_num_batched_tokens
        longest = now.max_model_len_tokens or LARGEST_TOKENS
        floor = max(SMALLEST_TOKENS, now.max_num_seqs, 0 if now.chunked_prefill else longest)
        low = min(_power_at_least(floor), stock)
        high = max(min(_power_at_least(longest), LARGEST_TOKENS), stock)
        budgets = sorted({*powers_of_two(1, max(high, 1)), stock})
        budgets = [budget for budget in budgets if low <= budget <= high]
        if len(budgets) == 1:
            return ()
        because = (
            f"between the batch width, {now.max_num_seqs}, which the engine demands, and the "
            f"longest sequence, {longest}; it trades gaps between tokens for time to the first"
        )
        if budgets == list(powers_of_two(low, high)):
            return (Knob.log2(self.name, low, high, default=stock, unit="tokens", because=because),)
        return (Knob.choice(self.name, budgets, default=stock, unit="tokens", because=because),)

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `max-num-batched-tokens`."""
        values = self.complete(parameters, ctx)
        stock = base_settings(ctx).max_num_batched_tokens
        budget = values.get(self.name, stock)
        if budget == stock:
            return self.make_choice(values, {}, f"the engine's own budget of {stock} tokens a step")
        effect = (
            "shorter steps, so that running requests wait less for the prompts of others"
            if isinstance(budget, int) and budget < stock
            else "fewer steps for a prompt, so that first tokens come sooner"
        )
        because = f"{budget} tokens a step instead of {stock}: {effect}"
        return self.make_choice(values, {"max-num-batched-tokens": budget}, because)


def _power_at_least(tokens: int) -> int:
    return 1 << max(tokens - 1, 0).bit_length()
