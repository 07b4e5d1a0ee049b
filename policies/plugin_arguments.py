"""Where a server's arguments ask for kvtune's plugin, and what for.

vLLM takes `--additional-config` whole, as one JSON object, or in parts
(`--additional-config.kvtune.quest.budget_tokens 512`). Policies name parts, so that several of them
and what a user asks for go side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from pydantic import JsonValue

from kvtune.policies.plugin_config import SECTION, PluginConfig, plugin_config

OPTION = "additional-config"
PREFIX = f"{OPTION}.{SECTION}."
QUEST_TOKENS = f"{PREFIX}quest.budget_tokens"
WINDOW_TOKENS = f"{PREFIX}streaming_llm.window_tokens"
EVICTION_SHARE = f"{PREFIX}page_eviction.share"
STORE_FORMAT = f"{PREFIX}store.format"
PROTECTED_TOKENS = f"{PREFIX}protect.prefix_tokens"
HOST_BYTES = f"{PREFIX}tiers.host_bytes"

NOTHING = PluginConfig()


def asked_by(arguments: Mapping[str, JsonValue]) -> PluginConfig:
    """What engine arguments ask of the plugin; all is off where they do not name it.

    Raises:
        BadInput: they ask for what the plugin does not have.
    """
    if not any(name.partition(".")[0] == OPTION for name in arguments):
        return NOTHING
    return plugin_config(whole(OPTION, arguments))


def kv_format(arguments: Mapping[str, JsonValue]) -> str:
    """In what keys and values are held: a `--kv-cache-dtype`, or `store` and its format.

    Raises:
        BadInput: the arguments ask for what the plugin does not have.
    """
    store = asked_by(arguments).store
    if store is None:
        return str(arguments.get("kv-cache-dtype", "auto"))
    bits = (store.bits_key, store.bits_value)
    return f"store {store.format}" + ("" if bits == (4, 4) else f" {bits[0]}/{bits[1]}")


def whole(option: str, arguments: Mapping[str, JsonValue]) -> JsonValue:
    """The value of an option with its parts (`option.a.b`) put where they belong; they win.

    None where the arguments do not name it. A value that has no parts of its own is left out of
    account where there are some.
    """
    found = deepcopy(arguments.get(option))
    for name, value in arguments.items():
        head, _, path = name.partition(".")
        if head != option or not path or value is None:
            continue
        if not isinstance(found, dict):
            found = {}
        *way, last = path.split(".")
        at = found
        for key in way:
            inner = at.get(key)
            if not isinstance(inner, dict):
                at[key] = inner = {}
            at = inner
        at[last] = value
    return found
