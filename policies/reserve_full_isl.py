"""Whether a prompt must fit as a whole before it is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.settings import base_settings
from kvtune.types import Choice, Harm

ARGUMENT = "scheduler-reserve-full-isl"
KNOB = "scheduler_reserve_full_isl"


class ReserveFullIsl(Policy):
    """Start a prompt as soon as its first chunk fits, instead of waiting for room for all of it."""

    name: ClassVar[str] = "reserve_full_isl"
    title: ClassVar[str] = "room for the whole prompt at admission"
    harm: ClassVar[Harm] = Harm.LOSSLESS
    saves: ClassVar[str] = "waiting"
    arguments: ClassVar[tuple[str, ...]] = (ARGUMENT,)

    def supports(self, ctx: Context) -> Support:
        """Refuse where prompts are never split or never compete."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if not base_settings(ctx).chunked_prefill:
            return Support.no("without chunked prefill a prompt is computed in one piece anyway")
        if ctx.max_concurrency == 1:
            return Support.no("one request at a time never waits for room")
        return Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer both."""
        because = "reserving avoids preemption, not reserving starts long prompts sooner"
        return (Knob.flag(KNOB, default=True, because=because),)

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `no-scheduler-reserve-full-isl`."""
        values = self.complete(parameters, ctx)
        if values[KNOB] is True:
            return self.make_choice(
                values, {}, "a prompt waits until all of it fits, as by default"
            )
        because = "a prompt starts as soon as its first chunk fits into the KV pool"
        return self.make_choice(values, {ARGUMENT: False}, because)
