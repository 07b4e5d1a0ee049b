"""What scores of given texts cannot show: policies that act once a prompt is computed.

A server scores a text as a prompt (vLLM's `prompt_logprobs`). Whoever leaves prompts as they are
diverges there by nothing, whatever its answers lose.
"""

from __future__ import annotations

from kvtune.policies.plugin_config import PluginConfig


def why_unscored(ours: PluginConfig, theirs: PluginConfig) -> str:
    """Why scores of texts tell nothing of what differs between two servers; empty if they do."""
    mine, others = ours.after_prompts, theirs.after_prompts
    return why_hidden(*(name for name in mine | others if mine.get(name) != others.get(name)))


def why_hidden(*names: str) -> str:
    """Why scores of texts do not show policies of these names; empty without any."""
    if not names:
        return ""
    acts = "acts" if len(names) == 1 else "act"
    return (
        f"{' and '.join(names)} {acts} on answers alone, not on prompts, and given texts are "
        "scored as prompts: scores would show no change, whatever is lost"
    )


def unprovable(limit: str, why: str) -> str:
    """Why a limit on scores of given texts cannot be proved, and what to do."""
    return (
        f"{limit!r} cannot be proved of it: {why}; limit what it answers instead, such as "
        "'needle >= -5pt' or 'multi-turn >= -5pt'"
    )
