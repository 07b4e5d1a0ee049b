"""What kvtune's plugin cannot be asked for together, or beside an option of vLLM's own.

One table for both sides: the plugin ends a start by it, and a search proposes nothing that it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtune.policies.plugin_config import PluginConfig


@dataclass(frozen=True, slots=True)
class Beside:
    """What is `asked` of the plugin, and the settings of the server that it has to go with."""

    asked: PluginConfig
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    hash_algo: str = "sha256"
    skips_kv_layers: bool = False


@dataclass(frozen=True, slots=True)
class Clash:
    """Why two things do not go together, and what helps.

    `repairs` are the knobs that a search may move to mend it, in the order in which to try them. A
    lossless one gives way to a lossy one, which could not be tried beside it otherwise.
    """

    applies: Callable[[Beside], bool]
    why: str
    fix: str
    repairs: tuple[str, ...]


CLASHES: tuple[Clash, ...] = (
    Clash(
        lambda now: now.asked.store is not None and now.kv_dtype != "auto",
        "its store is a format of its own, and --kv-cache-dtype asks for another",
        "leave --kv-cache-dtype or store out",
        ("kv_cache_dtype", "store_format"),
    ),
    Clash(
        lambda now: (
            now.asked.store is not None
            and now.asked.store.is_grouped
            and now.asked.quest is not None
        ),
        "quest splits pages by heads and requests as kivi's open pages cannot be",
        "take a store of another format, or leave quest out",
        ("store_format", "quest_budget_tokens"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and now.asked.quest is not None,
        "pages that tiers bring back have no summaries for quest to choose by",
        "take tiers or quest out",
        ("tier_host_bytes", "quest_budget_tokens"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and now.asked.page_eviction is not None,
        "tiers were never tried with page_eviction",
        "take tiers or page_eviction out",
        ("tier_host_bytes", "page_eviction_share"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and now.asked.store is not None,
        "tiers were never tried with a store",
        "take tiers or store out",
        ("tier_host_bytes", "store_format"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and now.kv_dtype.startswith("fp8"),
        "tiers were never tried with an fp8 cache",
        "take --kv-cache-dtype auto, or leave tiers out",
        ("tier_host_bytes", "kv_cache_dtype"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and not now.prefix_caching,
        "tiers keep what the prefix cache publishes, and it is off",
        "leave --no-enable-prefix-caching or tiers out",
        ("tier_host_bytes", "enable_prefix_caching"),
    ),
    Clash(
        lambda now: now.asked.tiers is not None and not now.hash_algo.startswith("sha256"),
        "tiers need a hash of tokens that no other tokens have",
        "set --prefix-caching-hash-algo sha256",
        ("prefix_caching_hash_algo",),
    ),
    Clash(
        lambda now: now.asked.page_eviction is not None and now.kv_dtype.startswith("fp8"),
        "page eviction reads keys back, which it cannot do from this --kv-cache-dtype",
        "take --kv-cache-dtype auto, or leave page_eviction out",
        ("kv_cache_dtype", "page_eviction_share"),
    ),
    Clash(
        lambda now: now.asked.page_eviction is not None and now.asked.store is not None,
        "page eviction reads keys back, which it cannot do from a store",
        "take page_eviction or store out",
        ("page_eviction_share", "store_format"),
    ),
    Clash(
        lambda now: now.asked.page_eviction is not None and now.asked.streaming_llm is not None,
        "streaming_llm and page_eviction both say which pages stay",
        "take streaming_llm or page_eviction out",
        ("page_eviction_share", "streaming_window_tokens"),
    ),
    Clash(
        lambda now: now.asked.is_asked and now.skips_kv_layers,
        "layers with KV formats of their own have pages of their own",
        "leave --kv-cache-dtype-skip-layers out",
        ("kv_cache_dtype_skip_layers",),
    ),
)


def clashes(now: Beside) -> tuple[Clash, ...]:
    """All that do not go together."""
    return tuple(clash for clash in CLASHES if clash.applies(now))
