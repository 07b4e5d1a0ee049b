"""Put choices together: their order, which of them do not go together, and how to say it briefly.

The rules are a table. A rule is broken by settings as they take effect, so a combination of a
choice with the user's own arguments, or with a default of the engine, is judged the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import PREFIX
from kvtune.policies.plugin_clashes import CLASHES, Clash
from kvtune.policies.settings import STOCK_HASH_ALGO, Settings, settings_of
from kvtune.types import Choice, PolicyStack

ORDER = (
    "kv_memory",
    "kv_dtype",
    "kv_skip_layers",
    "store_format",
    "page_selection",
    "streaming_window",
    "page_eviction",
    "host_tier",
    "block_size",
    "prefix_caching",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "chunk_threshold",
    "reserve_full_isl",
    "watermark",
)
"""The order of choices in a stack, and of knobs in a space. Other policies follow by name."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rule:
    """Two settings that do not go together.

    `refused` stops the engine at start; `dead` means that one of the two has no effect. `repairs`
    names the knobs that may be moved to mend it, in the order in which to try them.
    """

    effect: Literal["refused", "dead"]
    reason: str
    broken: Callable[[Settings], bool]
    repairs: tuple[str, ...]


def _rule(clash: Clash) -> Rule:
    """What kvtune's plugin refuses, as a rule of stacks."""
    return Rule(
        "refused",
        f"kvtune's plugin refuses this: {clash.why}",
        lambda now: clash.applies(now.beside),
        clash.repairs,
    )


RULES = (
    Rule(
        "refused",
        "vLLM refuses max-num-batched-tokens below max-num-seqs",
        lambda now: now.max_num_batched_tokens < now.max_num_seqs,
        ("max_num_batched_tokens", "max_num_seqs"),
    ),
    Rule(
        "refused",
        "vLLM refuses max-num-active-seqs above max-num-seqs",
        lambda now: now.max_num_active_seqs > now.max_num_seqs,
        ("max_num_active_seqs", "max_num_seqs"),
    ),
    Rule(
        "refused",
        "without chunked prefill vLLM refuses max-num-batched-tokens below max-model-len",
        lambda now: (
            not now.chunked_prefill and now.max_num_batched_tokens < (now.max_model_len_tokens or 0)
        ),
        ("max_num_batched_tokens",),
    ),
    Rule(
        "refused",
        "vLLM refuses long-prefill-token-threshold above max-model-len",
        lambda now: now.long_prefill_tokens > (now.max_model_len_tokens or now.long_prefill_tokens),
        ("long_prefill_token_threshold",),
    ),
    Rule(
        "dead",
        "long-prefill-token-threshold at or above max-num-batched-tokens caps nothing",
        lambda now: now.long_prefill_tokens >= now.max_num_batched_tokens,
        ("long_prefill_token_threshold",),
    ),
    Rule(
        "dead",
        "prefix-caching-hash-algo does nothing while prefix caching is off",
        lambda now: not now.prefix_caching and now.hash_algo != STOCK_HASH_ALGO,
        ("prefix_caching_hash_algo",),
    ),
    *(_rule(clash) for clash in CLASHES),
    Rule(
        "dead",
        "Quest reads everything where its budget holds all that StreamingLLM keeps",
        lambda now: _reads_all_kept(now),
        ("quest_budget_tokens",),
    ),
)


def compose(choices: Iterable[Choice]) -> PolicyStack:
    """Put choices into the fixed order, and leave out those that set nothing.

    Raises:
        BadInput: two choices set the same argument differently.
    """
    kept = sorted(
        (choice for choice in choices if choice.arguments),
        key=lambda choice: position(choice.policy),
    )
    owners: dict[str, Choice] = {}
    for choice in kept:
        for name, value in choice.arguments.items():
            other = owners.setdefault(name, choice)
            if other.arguments[name] != value:
                raise BadInput(
                    f"{other.policy} and {choice.policy} both set {name}, to "
                    f"{other.arguments[name]!r} and {value!r}",
                    fix="choose one of the two",
                )
    return PolicyStack(choices=tuple(kept))


def broken_rules(stack: PolicyStack, ctx: Context) -> tuple[Rule, ...]:
    """Return the rules that a stack breaks on top of the base arguments."""
    settings = settings_of({**ctx.base_arguments, **stack.arguments}, ctx)
    return tuple(rule for rule in RULES if rule.broken(settings))


def describe(stack: PolicyStack) -> str:
    """Say in one line what a stack sets."""
    parts = [_describe(name, value) for name, value in stack.arguments.items()]
    return ", ".join(parts) or "stock defaults"


def position(policy: str) -> tuple[int, str]:
    """Return the sort key of a policy's place in a stack."""
    return ORDER.index(policy) if policy in ORDER else len(ORDER), policy


def _reads_all_kept(now: Settings) -> bool:
    quest, kept = now.plugin.quest, now.sink_window
    if kept is None or quest is None or quest.budget_tokens is None:
        return False
    pages = -(-quest.budget_tokens // kept.block_tokens)
    return pages >= kept.sink_blocks + kept.window_blocks + 1


def _describe(name: str, value: JsonValue) -> str:
    name = name.removeprefix(PREFIX)
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if isinstance(value, list):
        return f"{name} {' '.join(map(str, value))}"
    if name.endswith(("-bytes", "_bytes")) and isinstance(value, int) and value % MIB == 0:
        return f"{name} {value // MIB} MiB"
    return f"{name} {value}"
