"""How many tokens of a long context a decode step reads: Quest in kvtune's plugin for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.plugin_arguments import QUEST_TOKENS, asked_by
from kvtune.policies.plugin_levers import budgets_tokens, context_tokens, why_not_offered
from kvtune.types import Choice, Harm

KNOB = "quest_budget_tokens"


class PageSelection(Policy):
    """Read only the pages of keys that may match the query (Quest, 2406.10774).

    Nothing is freed. The first layers, prompts and contexts within the budget are read in full.
    """

    name: ClassVar[str] = "page_selection"
    title: ClassVar[str] = "tokens that a decode step reads (Quest)"
    harm: ClassVar[Harm] = Harm.LOSSY
    saves: ClassVar[str] = "bandwidth"
    arguments: ClassVar[tuple[str, ...]] = (QUEST_TOKENS,)

    def supports(self, ctx: Context) -> Support:
        """Refuse where the plugin cannot serve it, or where no context is long enough."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        asked = asked_by(ctx.base_arguments)
        if asked.quest is not None:
            return Support.no("Quest is fixed by --engine-args")
        if asked.store is not None and asked.store.is_grouped:
            return Support.no(
                f"Quest does not go with {asked.store.format}, fixed by --engine-args"
            )
        if asked.tiers is not None:
            return Support.no("Quest does not go with tiers, which are fixed by --engine-args")
        reason = why_not_offered(ctx)
        return Support.no(reason) if reason else Support.yes()

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer budgets below the context of long requests; 0 is off."""
        budgets = budgets_tokens(ctx)
        if not budgets:
            return ()
        return (
            Knob.choice(
                KNOB,
                (0, *budgets),
                default=0,
                unit="tokens",
                because=f"long requests reach {context_tokens(ctx):,} tokens, and each decode step "
                "reads them all",
                named=QUEST_TOKENS,
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set Quest's budget under `additional-config`."""
        values = self.complete(parameters, ctx)
        budget = values.get(KNOB, 0)
        if budget == 0:
            return self.make_choice(values, {}, "decode steps read the whole context")
        because = (
            f"a decode step reads the pages that its query may need, {budget} tokens of them in "
            "most layers"
        )
        return self.make_choice(values, {QUEST_TOKENS: budget}, because)
