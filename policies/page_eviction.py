"""How much of a prompt stays once it is computed: page eviction in kvtune's plugin for vLLM."""

from __future__ import annotations

from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import EVICTION_SHARE, PROTECTED_TOKENS, asked_by
from kvtune.policies.plugin_config import PageEvictionConfig, PluginConfig
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.plugin_levers import SMALLEST_TOKENS, prompt_tokens
from kvtune.policies.settings import base_settings
from kvtune.policies.shared_prefix import protection
from kvtune.types import Harm

KNOB = "page_eviction_share"
SHARES = (0.25, 0.5)


class PageEviction(PluginLever):
    """Free the pages of a prompt that its end looks at least (ChunkKV, 2502.00299).

    A prompt is computed with all of its pages. More requests decode at once afterwards, and each
    reads less; what is gone is lost to later questions too.
    """

    name: ClassVar[str] = "page_eviction"
    title: ClassVar[str] = "share of a prompt's pages that stay (ChunkKV)"
    harm: ClassVar[Harm] = Harm.LOSSY
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (EVICTION_SHARE, PROTECTED_TOKENS)
    part: ClassVar[str] = "page_eviction"
    called: ClassVar[str] = "page eviction is"
    knob_name: ClassVar[str] = KNOB
    unit: ClassVar[str] = ""
    off: ClassVar[JsonValue] = 1.0

    def relieves(self, ctx: Context) -> frozenset[str]:
        """What is gone is not read either."""
        return frozenset({"capacity", "bandwidth"})

    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """Shares that leave long prompts enough, each fewer pages than the next."""
        prompt, block = prompt_tokens(ctx), base_settings(ctx).block_tokens
        if prompt is None:
            return ()
        by_pages = {self._kept(share, prompt, ctx): share for share in (*SHARES, 1.0)}
        enough = -(-SMALLEST_TOKENS // block)
        return tuple(share for kept, share in by_pages.items() if kept >= enough and share < 1)

    def unneeded(self, ctx: Context) -> str:
        """Short prompts are kept whole."""
        if self.wanted(ctx):
            return ""
        if (prompt := prompt_tokens(ctx)) is None:
            return "it is not known how long prompts are"
        block = base_settings(ctx).block_tokens
        return f"prompts of {prompt:,} tokens are too short to do without pages of {block}"

    def because(self, ctx: Context) -> str:
        """Say how long prompts are."""
        return f"long prompts have {prompt_tokens(ctx):,} tokens, all held while they are answered"

    def says(self, value: JsonValue) -> str:
        """Say what stays."""
        if value == self.off:
            return "prompts keep all of their pages"
        return f"{value:.0%} of a prompt's pages stay once it is computed, those its end looks at"

    def beside(self, value: JsonValue, ctx: Context) -> dict[str, JsonValue]:
        """Keep what prompts have in common, where it is no more than half of what stays."""
        prompt = prompt_tokens(ctx)
        if prompt is None or not isinstance(value, float):
            return {}
        return protection(value * prompt / 2, ctx)

    def _kept(self, share: float, prompt: int, ctx: Context) -> int:
        """How many pages stay of a prompt."""
        block = base_settings(ctx).block_tokens
        if share == 1:
            return -(-prompt // block)
        protect = asked_by({**ctx.base_arguments, **self.beside(share, ctx)}).protect
        asked = PluginConfig(page_eviction=PageEvictionConfig(share=share), protect=protect)
        budget = asked.page_budget(block)
        assert budget is not None
        return budget.kept(prompt)
