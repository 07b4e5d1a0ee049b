"""How many tokens of a long context a decode step reads: Quest in kvtune's plugin for vLLM."""

from __future__ import annotations

from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import QUEST_TOKENS
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.plugin_levers import budgets_tokens, context_tokens, why_all_is_kept
from kvtune.types import Harm

KNOB = "quest_budget_tokens"


class PageSelection(PluginLever):
    """Read only the pages of keys that may match the query (Quest, 2406.10774).

    Nothing is freed. The first layers, prompts and contexts within the budget are read in full.
    """

    name: ClassVar[str] = "page_selection"
    title: ClassVar[str] = "tokens that a decode step reads (Quest)"
    harm: ClassVar[Harm] = Harm.LOSSY
    saves: ClassVar[str] = "bandwidth"
    arguments: ClassVar[tuple[str, ...]] = (QUEST_TOKENS,)
    part: ClassVar[str] = "quest"
    called: ClassVar[str] = "Quest is"
    knob_name: ClassVar[str] = KNOB
    unit: ClassVar[str] = "tokens"
    off: ClassVar[JsonValue] = 0

    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """Budgets below the context of long requests; 0 reads everything."""
        return budgets_tokens(ctx)

    def unneeded(self, ctx: Context) -> str:
        """Short contexts are read whole anyway."""
        return why_all_is_kept(ctx)

    def because(self, ctx: Context) -> str:
        """Say how long contexts get."""
        return (
            f"long requests reach {context_tokens(ctx):,} tokens, and each decode step reads them "
            "all"
        )

    def says(self, value: JsonValue) -> str:
        """Say what a decode step reads."""
        if value == self.off:
            return "decode steps read the whole context"
        return (
            f"a decode step reads the pages that its query may need, {value} tokens of them in "
            "most layers"
        )
