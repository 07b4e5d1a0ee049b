"""Figures of a workload: lengths, arrivals and prefixes that come again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.autotune.report.page import Figure
from kvtune.autotune.words import digits
from kvtune.profilers.arrivals import Arrivals
from kvtune.types import Histogram

OURS, PLAIN, MARKED = "#2f86d6", "#8fa3b8", "#e08a1e"
"""A server's own, what it is compared with, and what to look at; all to be seen in both modes."""


def bin_names(histogram: Histogram) -> list[str]:
    """What each bin of a histogram holds, in words."""
    return [
        f"{low:,.0f}" if high - low <= 1 else f"{low:,.0f} to {high:,.0f}"
        for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)
    ]


def lengths_figure(what: str, found: Histogram) -> Figure:
    """How many requests have a prompt, or an answer, of which length."""
    known = {"mean": found.mean, "median": found.p50, "p95": found.p95, "p99": found.p99}
    words = ", ".join(f"{name} {digits(value)}" for name, value in known.items() if value)
    data = {
        "type": "bar",
        "x": bin_names(found),
        "y": list(found.counts),
        "marker": {"color": OURS},
        "hovertemplate": "%{x} tokens: %{y:,} requests<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": f"{what} tokens"}, "type": "category"},
        "yaxis": {"title": {"text": "requests"}, "rangemode": "tozero"},
        # Few bins would else be bars as wide as the page.
        "bargap": max(0.08, 1 - 0.12 * len(found.counts)),
    }
    return Figure(
        f"Lengths of {what}s.", f"In tokens: {words}.", {"data": [data], "layout": layout}, 300
    )


def arrivals_figure(found: Arrivals, what: str) -> Figure:
    """Requests a second over time."""
    data = {
        "type": "bar",
        "x": [start_s + found.bin_s / 2 for start_s in found.starts_s],
        "y": list(found.rates_per_s),
        "width": found.bin_s,
        "marker": {"color": OURS, "line": {"width": 0}},
        "hovertemplate": "at %{x:.1f} s: %{y:.3g} requests/s<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "seconds after the first request"}},
        "yaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
        "bargap": 0,
    }
    most = max(found.rates_per_s)
    return Figure(
        f"Arrivals, {what}.",
        f"Requests a second in steps of {digits(found.bin_s)} s; at most {digits(most)}.",
        {"data": [data], "layout": layout},
        300,
    )


def reuse_figure(
    reusable: Mapping[int, float], block_tokens: int | None = None, served: float | None = None
) -> Figure:
    """What a prefix cache could serve at each block size, and what the server's did serve."""
    sizes = [str(size) for size in reusable]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": "comes again",
            "x": sizes,
            "y": list(reusable.values()),
            "marker": {"color": [OURS if size == block_tokens else PLAIN for size in reusable]},
            "hovertemplate": "blocks of %{x}: %{y:.1%} come again<extra></extra>",
        }
    ]
    description = "Share of prompt tokens that an unbounded prefix cache would serve."
    if block_tokens in reusable:
        description += f" The server's own blocks hold {block_tokens} tokens (the marked bar)."
    if served is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "served by this server",
                "x": sizes,
                "y": [served] * len(sizes),
                "line": {"color": MARKED, "width": 3, "dash": "dash"},
                "hovertemplate": "served: %{y:.1%}<extra></extra>",
            }
        )
        description += f" This server served {served:.1%} (dashed)."
    layout = {
        "xaxis": {"title": {"text": "tokens in a block"}, "type": "category"},
        "yaxis": {
            "title": {"text": "share of prompt tokens"},
            "tickformat": ".0%",
            "rangemode": "tozero",
        },
        "bargap": 0.3,
        "showlegend": served is not None,
    }
    return Figure("Prefixes that come again.", description, {"data": data, "layout": layout}, 320)
