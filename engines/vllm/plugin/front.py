"""The process that reads a server's arguments: check what is asked before anything starts.

An `LLM(...)` and every way to start a server make their configuration in one method of vLLM's,
which is wrapped here. What cannot be served ends the start there and then, in one line, instead of
in a worker minutes later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from typing import Any

from kvtune.engines.vllm.plugin import collector
from kvtune.engines.vllm.plugin.asked import asked_of
from kvtune.engines.vllm.plugin.evict import marks
from kvtune.engines.vllm.plugin.facts import BACKEND, facts_of
from kvtune.engines.vllm.plugin.refusals import TESTED, Facts, is_tested, refusals
from kvtune.engines.vllm.plugin.tiers import entry
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, plugin_config

_log = logging.getLogger("vllm.kvtune")


def register() -> None:
    """Put our backend where vLLM looks for one, and our check before a start. Idempotent."""
    # Another version of vLLM may have no such place. Servers that ask are refused there; all others
    # have to start.
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for member in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
            if not member.is_overridden():
                register_backend(member, BACKEND)
    # Processes that read no arguments need not have it.
    if arguments := sys.modules.get("vllm.engine.arg_utils"):
        _wrap(arguments.EngineArgs)


def _wrap(engine_args: Any) -> None:
    original = engine_args.create_engine_config
    if hasattr(original, "kvtune_checks"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, usage_context: Any = None, *rest: Any, **named: Any) -> Any:
        try:
            plugin_config(getattr(self, "additional_config", None))
            config = original(self, usage_context, *rest, **named)
            begin(config)
        except BadInput as error:
            if getattr(usage_context, "name", "") == "OPENAI_API_SERVER":
                # A traceback would bury the line in which a user reads what to do.
                raise SystemExit(f"kvtune: {error.message}. To fix: {error.fix}.") from None
            error.add_note(f"To fix: {error.fix}.")
            raise
        return config

    create_engine_config.kvtune_checks = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def begin(vllm_config: Any) -> None:
    """Refuse what cannot be served, and say what will be.

    Raises:
        BadInput: something of the configuration and what is asked do not go together.
    """
    asked = asked_of(vllm_config)
    _forget_backends()
    if not asked.is_asked:
        return
    facts = checked(vllm_config, asked)
    if not is_tested(facts.vllm_version):
        _log.warning(
            "kvtune's plugin was never tried with vLLM %s (tried: %s). Its self-test guards the "
            "attention alone: compare answers with a stock server before you rely on it.",
            facts.vllm_version,
            TESTED,
        )
    _log.info("kvtune's plugin is on: %s", asked.model_dump_json(exclude_none=True))
    collector.begin(asked, vllm_config)
    if asked.page_eviction is not None or asked.streaming_llm is not None:
        marks.refuse_bad_marks()
    if asked.page_eviction is not None:
        from kvtune.engines.vllm.plugin.evict import connector

        connector.attach(vllm_config)
    if asked.tiers is not None:
        entry.enter(vllm_config, asked.tiers)


def checked(vllm_config: Any, asked: PluginConfig) -> Facts:
    """What is known of a configuration, if what is `asked` for can be served by it.

    Raises:
        BadInput: it cannot.
    """
    try:
        facts = facts_of(vllm_config)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"the plugin does not find its way in this version of vLLM: {error}",
            fix=f"install vLLM {TESTED}, or take kvtune's section out of --additional-config",
        ) from error
    if reasons := refusals(facts, asked):
        raise BadInput(
            f"the plugin cannot serve this: {'; '.join(each.why for each in reasons)}",
            fix="; ".join(dict.fromkeys(each.fix for each in reasons)),
        )
    return facts


def check_again(vllm_config: Any, asked: PluginConfig) -> None:
    """Refuse in a worker what never came by `begin`: a configuration that a program made itself.

    Raises:
        BadInput: it cannot be served, or a connector is missing that `begin` enters.
    """
    checked(vllm_config, asked)
    needs_connector = asked.page_eviction is not None or asked.tiers is not None
    if needs_connector and vllm_config.kv_transfer_config is None:
        raise BadInput(
            "the plugin could not enter its connector into this configuration",
            fix="make it by EngineArgs.create_engine_config after load_general_plugins, as vLLM's "
            "own servers do, or leave page_eviction and tiers out",
        )


def _forget_backends() -> None:
    """Let vLLM look for a backend anew, as it keeps the last one for whatever is asked next."""
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.v1.attention import selector

        selector._cached_get_attn_backend.cache_clear()
