"""What is forecast of kvtune's plugin beside a server: its policies at a few values each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from kvtune.autotune.forecast.read_times import UNCHANGED, Times
from kvtune.policies.base import Context
from kvtune.policies.method import History
from kvtune.policies.page_eviction import PageEviction
from kvtune.policies.plugin_arguments import (
    EVICTION_SHARE,
    QUEST_TOKENS,
    STORE_FORMAT,
    WINDOW_TOKENS,
)
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.settings import base_settings
from kvtune.policies.store_format import FORMATS
from kvtune.policies.streaming_window import StreamingWindow

QUEST_SAVED: Times = (1.0, 0.75, 0.0)
KEPT_SAVED: Times = (1.0, 1.0, 0.5)
"""Of the time for what kvtune's plugin does not read, what is saved: best, expected, worst. Quest
pays with it for choosing pages: on two CPU cores, eight sequences of 128 pages of 128 tokens saved
0.8 of it in the attention of a layer, those of 16 pages nothing. What is freed leaves the block
table, so that stock kernels see a shorter sequence; how much that saves is a guess."""


@dataclass(frozen=True, slots=True)
class PluginOffer:
    """The arguments that ask for a policy, and what it does in a few words."""

    name: str
    says: str
    arguments: Mapping[str, JsonValue]


def saved_times(asked: PluginConfig) -> Times:
    """Of the time for what is left unread, what is saved: best, expected and worst."""
    if asked.quest is not None:
        return QUEST_SAVED
    keeps_less = asked.streaming_llm is not None or asked.page_eviction is not None
    return KEPT_SAVED if keeps_less else UNCHANGED


def plugin_budgets(mean: History, shares: Sequence[float], block_tokens: int) -> list[PluginOffer]:
    """Budgets that are such `shares` of a mean request, and every format of a store."""
    found = []
    for budget in dict.fromkeys(max(int(mean.tokens * one), 2 * block_tokens) for one in shares):
        quest = f"reads {budget:,} tokens of a context in most layers"
        window = f"keeps the first and the last {budget:,} tokens"
        found += [
            PluginOffer(f"quest {budget}", quest, {QUEST_TOKENS: budget}),
            PluginOffer(f"streaming-llm {budget}", window, {WINDOW_TOKENS: budget}),
        ]
    for share in shares:
        says = f"keeps {share:.0%} of a prompt's pages once it is computed"
        found.append(PluginOffer(f"page-eviction {share:g}", says, {EVICTION_SHARE: share}))
    for name in FORMATS:
        says = f"holds keys and values as {name}, and reads them back to full precision"
        found.append(PluginOffer(f"store {name}", says, {STORE_FORMAT: name}))
    return found


def plugin_offers(mean: History, shares: Sequence[float], ctx: Context) -> list[PluginOffer]:
    """The same for a server, as a search would try it: what prompts have in common is protected.

    Pages are evicted only down to shares that leave long prompts enough.
    """
    window, eviction = StreamingWindow(), PageEviction()
    enough = eviction.wanted(ctx)
    found = []
    for one in plugin_budgets(mean, shares, base_settings(ctx).block_tokens):
        more: Mapping[str, JsonValue] = {}
        if (tokens := one.arguments.get(WINDOW_TOKENS)) is not None:
            more = window.beside(tokens, ctx)
        elif (share := one.arguments.get(EVICTION_SHARE)) is not None:
            if share not in enough:
                continue
            more = eviction.beside(share, ctx)
        found.append(replace(one, arguments={**one.arguments, **more}))
    return found
