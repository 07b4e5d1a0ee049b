"""How many of a request's latest tokens stay: StreamingLLM in kvtune's plugin for vLLM."""

from __future__ import annotations

from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import PROTECTED_TOKENS, WINDOW_TOKENS
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.plugin_levers import budgets_tokens, context_tokens, why_all_is_kept
from kvtune.policies.shared_prefix import protection
from kvtune.types import Harm

KNOB = "streaming_window_tokens"


class StreamingWindow(PluginLever):
    """Keep the first and the latest tokens, and free the pages between (StreamingLLM, 2309.17453).

    A request holds no more than that, so that more of them fit and prompts may outgrow the pool.
    What lies between is forgotten.
    """

    name: ClassVar[str] = "streaming_window"
    title: ClassVar[str] = "latest tokens that a request keeps (StreamingLLM)"
    harm: ClassVar[Harm] = Harm.LOSSY
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (WINDOW_TOKENS, PROTECTED_TOKENS)
    part: ClassVar[str] = "streaming_llm"
    called: ClassVar[str] = "StreamingLLM is"
    knob_name: ClassVar[str] = KNOB
    unit: ClassVar[str] = "tokens"
    off: ClassVar[JsonValue] = 0

    def relieves(self, ctx: Context) -> frozenset[str]:
        """What is gone is not read either."""
        return frozenset({"capacity", "bandwidth"})

    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """Windows below the length of long requests; 0 keeps everything."""
        return budgets_tokens(ctx)

    def unneeded(self, ctx: Context) -> str:
        """Short requests are kept whole anyway."""
        return why_all_is_kept(ctx)

    def because(self, ctx: Context) -> str:
        """Say how long requests get."""
        return f"long requests reach {context_tokens(ctx):,} tokens, and hold them all"

    def says(self, value: JsonValue) -> str:
        """Say what a request keeps."""
        if value == self.off:
            return "requests keep all of their tokens"
        return f"a request keeps its first tokens and the last {value}, and frees the others"

    def beside(self, value: JsonValue, ctx: Context) -> dict[str, JsonValue]:
        """Keep what prompts have in common too, where it is no more than the window."""
        return protection(value, ctx) if isinstance(value, int) else {}
