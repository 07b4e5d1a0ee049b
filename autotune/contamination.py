"""Whether a prefix cache served a replay what no request of it had brought there.

Salts keep the prompts of every repeat apart, so hits beyond what the requests share with each other
come from somewhere else: another client, or a cache that does not tell salts apart. Latencies of
such a run are too good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtune.profilers.fingerprint import BLOCK_SIZES, fingerprint
from kvtune.profilers.measure import LoadPlan, sent_requests
from kvtune.profilers.prefix_use import prefix_use
from kvtune.profilers.window import Window
from kvtune.types import EffectiveConfig, Failure, FailureClass, LoadRun, Request

TOLERATED = 0.02
"""Share of the prompt tokens that may be served beyond what requests share: none, but for what
counters say late."""


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
    most_tokens = None if effective is None else effective.max_model_len_tokens
    window = Window(
        window_s=run.duration_s,
        counters=run.counters,
        effective=effective,
        reusable_prefix_share=reusable_share(requests, plan, most_tokens),
    )
    beyond = prefix_use(window).beyond
    if beyond is None or beyond <= TOLERATED:
        return None
    return Failure(
        failure=FailureClass.CONTAMINATED,
        message=f"the prefix cache served {beyond:.0%} of the prompt tokens beyond all that the "
        "requests share: it held prompts that this run had not sent",
        fix="let nobody else use the server, and see that it tells cache salts apart",
    )


def reusable_share(
    requests: Sequence[Request], plan: LoadPlan, max_model_len_tokens: int | None
) -> Mapping[int, float]:
    """By block size, the share of prompt tokens that an unbounded cache would serve of a replay.

    Empty if the tokens of any prompt are not known.
    """
    sent = sent_requests(requests, plan, max_model_len_tokens=max_model_len_tokens)
    if any(request.input_tokens is None and request.token_ids is None for request in sent):
        return {}
    as_sent = [_clipped(request, plan, max_model_len_tokens) for request in sent]
    # Of lengths alone nothing is shared: their tokens are drawn at random.
    return fingerprint(as_sent).reusable_prefix_share or dict.fromkeys(BLOCK_SIZES, 0.0)


def _clipped(request: Request, plan: LoadPlan, max_model_len_tokens: int | None) -> Request:
    """As `materialize` cuts it."""
    if request.input_tokens is None or max_model_len_tokens is None:
        return request
    output_tokens = request.output_tokens or plan.default_output_tokens
    return replace(
        request, input_tokens=min(request.input_tokens, max_model_len_tokens - output_tokens)
    )
