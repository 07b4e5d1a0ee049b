"""How much of one step a single long prompt may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.settings import Settings, base_settings
from kvtune.types import Choice, Harm

SMALLEST_TOKENS = 128
ARGUMENT = "long-prefill-token-threshold"
KNOB = "long_prefill_token_threshold"


class ChunkThreshold(Policy):
    """Cap the chunk of one prompt while others wait, so that a long one does not starve them."""

    name: ClassVar[str] = "chunk_threshold"
    title: ClassVar[str] = "share of a step for one long prompt"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "interference"
    arguments: ClassVar[tuple[str, ...]] = (ARGUMENT,)

    def supports(self, ctx: Context) -> Support:
        """Refuse unless prompts are long enough to fill most of a step."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        now = base_settings(ctx)
        if not now.chunked_prefill:
            return Support.no("chunked prefill is turned off by --engine-args")
        if ctx.max_concurrency == 1:
            return Support.no("one request at a time has nobody to starve")
        longest = _long_prompt_tokens(ctx)
        if longest is None:
            return Support.no("the lengths of prompts are not known")
        if not _caps(now, longest):
            return Support.no(
                f"prompts are short for a step: 95% have at most {longest} tokens of the "
                f"{now.max_num_batched_tokens} that a step computes"
            )
        return Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer caps below both the step and the long prompts; 0 is none."""
        longest = _long_prompt_tokens(ctx) or 0
        caps = _caps(base_settings(ctx), longest)
        if not caps:
            return ()
        return (
            Knob.choice(
                KNOB,
                (0, *caps),
                default=0,
                unit="tokens",
                because=f"5% of prompts have more than {longest} tokens and fill steps alone",
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `long-prefill-token-threshold`."""
        values = self.complete(parameters, ctx)
        cap = values.get(KNOB, 0)
        if cap == 0:
            return self.make_choice(values, {}, "a prompt may fill a step, as by default")
        because = f"one prompt takes at most {cap} tokens of a step while other requests wait"
        return self.make_choice(values, {ARGUMENT: cap}, because)


def _long_prompt_tokens(ctx: Context) -> int | None:
    lengths = ctx.fingerprint.input_tokens if ctx.fingerprint else None
    return None if lengths is None or lengths.p95 is None else round(lengths.p95)


def _caps(now: Settings, longest: int) -> tuple[int, ...]:
    """Return the caps that bind: none unless long prompts take more than half a step."""
    budget = now.max_num_batched_tokens
    if 2 * longest <= budget:
        return ()
    top = min(budget, longest, (now.max_model_len_tokens or longest) + 1)
    caps = (SMALLEST_TOKENS << bits for bits in range(top.bit_length()))
    return tuple(cap for cap in caps if cap < top)
