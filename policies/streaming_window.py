"""How many of a request's latest tokens stay: StreamingLLM in kvtune's plugin for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.plugin_arguments import WINDOW_TOKENS, asked_by
from kvtune.policies.plugin_levers import budgets_tokens, context_tokens, why_not_offered
from kvtune.types import Choice, Harm

KNOB = "streaming_window_tokens"


class StreamingWindow(Policy):
    """Keep the first and the latest tokens, and free the pages between (StreamingLLM, 2309.17453).

    A request holds no more than that, so that more of them fit and prompts may outgrow the pool.
    What lies between is forgotten.
    """

    name: ClassVar[str] = "streaming_window"
    title: ClassVar[str] = "latest tokens that a request keeps (StreamingLLM)"
    harm: ClassVar[Harm] = Harm.LOSSY
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (WINDOW_TOKENS,)

    def supports(self, ctx: Context) -> Support:
        """Refuse where the plugin cannot serve it, or where no request is long enough."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        asked = asked_by(ctx.base_arguments)
        if asked.streaming_llm is not None:
            return Support.no("StreamingLLM is fixed by --engine-args")
        if asked.page_eviction is not None:
            return Support.no("page_eviction is fixed by --engine-args and says which pages stay")
        reason = why_not_offered(ctx)
        return Support.no(reason) if reason else Support.yes()

    def relieves(self, ctx: Context) -> frozenset[str]:
        """What is gone is not read either."""
        return frozenset({"capacity", "bandwidth"})

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer windows below the length of long requests; 0 keeps everything."""
        windows = budgets_tokens(ctx)
        if not windows:
            return ()
        return (
            Knob.choice(
                KNOB,
                (0, *windows),
                default=0,
                unit="tokens",
                because=f"long requests reach {context_tokens(ctx):,} tokens, and hold them all",
                named=WINDOW_TOKENS,
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set StreamingLLM's window under `additional-config`."""
        values = self.complete(parameters, ctx)
        window = values.get(KNOB, 0)
        if window == 0:
            return self.make_choice(values, {}, "requests keep all of their tokens")
        because = f"a request keeps its first tokens and the last {window}, and frees the others"
        return self.make_choice(values, {WINDOW_TOKENS: window}, because)
