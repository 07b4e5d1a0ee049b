"""Whether a prefix cache served a replay what no request of it had brought there.

Salts keep the prompts of every repeat apart, so hits beyond what the requests share with each other
come from somewhere else: another client, or a cache that does not tell salts apart. Latencies of
such a run are too good.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd

from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.materialize import materialize
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.window import Window
from kvtune.types import EffectiveConfig, Failure, FailureClass, LoadRun, Request

TOLERATED = 0.02
"""Share of the prompt tokens that may be served beyond what requests share: none, but for what
counters say late."""

FINEST_TOKENS = 16
"""Blocks of the engine may be hashed in parts of this size; smaller ones serve no less."""


def contamination(
    run: LoadRun,
    requests: Sequence[Request],
    plan: LoadPlan,
    effective: EffectiveConfig | None,
) -> Failure | None:
    """The failure that hits of nobody's making amount to; `None` where none are known.

    Nothing is known of requests whose tokens only the server knows, nor of a server that does not
    count.
    """
    hits = Window(run.duration_s, run.counters).prefix_hits
    if not hits or effective is None or effective.block_size_tokens is None:
        return None
    most = reusable_share(
        requests,
        plan,
        block_tokens=gcd(effective.block_size_tokens, FINEST_TOKENS),
        max_model_len_tokens=effective.max_model_len_tokens,
    )
    if most is None or hits - most <= TOLERATED:
        return None
    return Failure(
        failure=FailureClass.CONTAMINATED,
        message=f"the prefix cache served {hits - most:.0%} of the prompt tokens beyond all that "
        "the requests share: it held prompts that this run had not sent",
        fix="let nobody else use the server, and see that it tells cache salts apart",
    )


def reusable_share(
    requests: Sequence[Request],
    plan: LoadPlan,
    *,
    block_tokens: int,
    max_model_len_tokens: int | None,
) -> float | None:
    """The share of prompt tokens that an unbounded cache would serve of a replay, as it is sent.

    `None` if the tokens of any prompt are not known; if one prompt begins with another, whose
    answer it may repeat, so that the cache has that too; or if there are too many to count exactly.
    """
    made = materialize(
        requests,
        vocab_size=plan.vocab_size,
        max_model_len_tokens=max_model_len_tokens,
        salt=0,
        default_output_tokens=plan.default_output_tokens,
    ).requests
    prompts = sorted(request.token_ids for request in made if request.token_ids is not None)
    if len(prompts) < len(made) or any(
        one != next_one and next_one[: len(one)] == one for one, next_one in pairwise(prompts)
    ):
        return None
    found = fingerprint(made, (block_tokens,))
    return None if found.sampled else found.reusable_prefix_share.get(block_tokens)
