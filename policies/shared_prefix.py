"""The beginning that prompts have in common, which policies that drop tokens leave alone.

A system prompt that is dropped is forgotten by all answers at once, so it stays as sinks do, in
whole pages, where that leaves a policy something to do.
"""

from __future__ import annotations

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import PROTECTED_TOKENS, asked_by
from kvtune.policies.settings import base_settings


def protection(most_tokens: float, ctx: Context) -> dict[str, JsonValue]:
    """The argument that keeps it, if it has no more than `most_tokens`; empty where none is needed.

    What the user protects stays as it is, and a first page is kept in any case.
    """
    shared = None if ctx.fingerprint is None else ctx.fingerprint.shared_prefix_tokens
    if shared is None or not base_settings(ctx).block_tokens < shared <= most_tokens:
        return {}
    if asked_by(ctx.base_arguments).protect.prefix_tokens:
        return {}
    return {PROTECTED_TOKENS: shared}
