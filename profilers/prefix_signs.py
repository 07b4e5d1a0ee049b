"""Signs of a prefix cache that is too small to keep what comes again, and of its look-alikes."""

from __future__ import annotations

from kvtune.profilers.prefix_use import IDLE, REUSE_GAP, PrefixUse, prefix_use
from kvtune.profilers.sign import TELL_CONFIGURATION, Sign, make_sign
from kvtune.profilers.step_shares import fitted_step, step_model
from kvtune.profilers.window import (
    HITS,
    LOOKUPS_MOST_PER_PROMPT,
    QUERIES,
    STEP_TOKENS,
    Window,
)

PREFIX_LEAST_SHARE = 0.2
"""A fifth of the prompt tokens: fewer are within what order and timing of requests do to hits."""

BEYOND_LEAST_SHARE = 0.05
"""Hits that reuse can't explain; the edges of a window explain less than this."""

AVOIDABLE_LEAST_SHARE = 0.1
"""Recomputing that takes less than this of the time can't win more than about 10% if spared."""

PREFILL_LEAST_SHARE = 0.2
"""Where the reuse is not known, all of prefill is the most that a larger cache could spare."""

TURNOVER_LEAST = 1.0
"""Once the cache was filled anew, blocks of this very window were written over."""

IDLE_MOST_GAPS = 2.0
"""An LRU cache cuts off every use that comes later than it keeps a block. Where uses lie half as
far apart as that on average, many are cut off."""


def prefix_signs(window: Window) -> dict[str, Sign]:
    """Read them from the window."""
    use = prefix_use(window)
    known = "reuse of the workload"
    replay = "replay the workload with --workload, so that its reuse is known"
    return {
        "looked_up_again": make_sign(
            "prefix_lookups_per_prompt_token",
            use.lookups_per_prompt,
            LOOKUPS_MOST_PER_PROMPT,
            QUERIES,
            "requests that waited or were preempted were looked up again, so that counted hits "
            "hold tokens of their own",
            "",
            unit="tokens",
        ),
        "beyond_reuse": make_sign(
            "prefix_hits_beyond_reuse",
            use.beyond,
            BEYOND_LEAST_SHARE,
            f"{HITS}, {known}",
            "hits were no reuse within this workload: recomputed after a preemption, or cached "
            "before it",
            "",
        ),
        "below_blocks": make_sign(
            "reusable_below_block_size",
            use.below_blocks,
            PREFIX_LEAST_SHARE,
            f"{known}, effective block_size",
            "prefixes are shared that are shorter than a block, which only smaller blocks can "
            "serve; few hits are right here",
            "",
        ),
        "missed": make_sign(
            "reusable_prefix_missed",
            use.missed,
            PREFIX_LEAST_SHARE,
            f"{HITS}, {known}",
            "prompt tokens that came before were computed again",
            replay if not window.reusable_prefix_share else "",
        ),
        "avoidable": make_sign(
            "avoidable_prefill_time_share",
            _avoidable_time(window, use),
            AVOIDABLE_LEAST_SHARE,
            f"{HITS}, {known}, share of prefill",
            "computing known prompt tokens again takes time that matters",
            "",
        ),
        "prefill_work": make_sign(
            "prefill_work_time_share",
            prefill_time_share(window),
            PREFILL_LEAST_SHARE,
            "request times, or the division of a step",
            "computing prompts takes a good part of the time",
            "",
        ),
        "turned_over": make_sign(
            "kv_cache_turnover",
            use.turnover,
            TURNOVER_LEAST,
            f"{STEP_TOKENS}, effective kv_cache_size_tokens",
            "more tokens were stored than the KV cache holds, so that blocks were written over",
            f"needs kv_cache_size_tokens: {TELL_CONFIGURATION}",
            unit="times",
        ),
        "hits_fell": make_sign(
            "prefix_hit_fall",
            use.fall,
            PREFIX_LEAST_SHARE,
            f"samples of {QUERIES}, {HITS}",
            "the share of prefix hits fell while lookups went on",
            "",
        ),
        "evicted_early": make_sign(
            "idle_before_evict_per_reuse_gap",
            use.idle_per_gap,
            IDLE_MOST_GAPS,
            f"{IDLE}, {REUSE_GAP}",
            "blocks are evicted about as soon as others are used again",
            "",
            unit="gaps",
            below=True,
        ),
    }


def prefill_time_share(window: Window) -> float | None:
    """Share of the time that computes prompts: of a mean step, or of the requests' time.

    The larger one: the requests' decode time holds the prefill of the others.
    """
    fitted, model = fitted_step(window), step_model(window)
    known = (
        window.prefill_share,
        None if fitted is None else fitted.prefill,
        None if fitted is not None or model is None else model.arithmetic,
    )
    return max((share for share in known if share is not None), default=None)


def _avoidable_time(window: Window, use: PrefixUse) -> float | None:
    share = prefill_time_share(window)
    return None if share is None or use.avoidable is None else use.avoidable * share
