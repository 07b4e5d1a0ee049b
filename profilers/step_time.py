"""What a decode step costs: a fixed part, a part a sequence, and a part a resident token.

A linear model of the time of a step, fitted to what requests saw (`step_gaps`). Rows are medians,
so that a late message does not count; they are weighted by Huber's rule ("Robust estimation of a
location parameter", 1964) on relative errors, and no part may be negative. Intervals come from a
bootstrap over groups of rows, at the expanded percentiles of Hesterberg ("What teachers should know
about the bootstrap", arXiv 1411.5279), which make up for there being few groups.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from kvtune.profilers.statistics import t_quantile
from kvtune.profilers.step_gaps import Counts, Floats, Observations
from kvtune.types import Ceilings, Interval, StepTimeModel

CONFIDENCE = 0.95
RESAMPLES = 400
MIN_GROUPS = 6
MIN_SPREAD = 1.5
"""The largest batch, and the most resident tokens, are at least this many times the smallest."""

MAX_CONDITION = 30.0
"""Condition number above which the parts cannot be told apart (Belsley, Kuh and Welsch, 1980)."""

CELL_RATIO = 1.2
"""Resident tokens that differ by less than this share a row."""

ENOUGH_STEPS = 16
"""Steps beyond which a row weighs no more: what disturbs it disturbs all its steps."""

HUBER_K = 1.345
_ROUNDS = 8
_TERMS = 3


class _Rows(NamedTuple):
    """Steps alike, put together: arrays of (rows,), but for `design`, (rows, 3)."""

    design: Floats
    step_s: Floats
    weight: Floats
    group: Counts


def missing_for_fit(found: Observations) -> tuple[str, ...]:
    """What keeps a step-time model from being fitted; empty when it can be."""
    return _missing(_usable(found))


def fit_step_time(
    found: Observations,
    *,
    source: Literal["probe", "load"],
    weight_bytes: int | None = None,
    kv_bytes_per_token: float | None = None,
    ceilings: Ceilings | None = None,
    seed: int = 0,
) -> StepTimeModel | None:
    """Fit the model; `None` where `missing_for_fit` says why not.

    Steps in which a request waited for its first token are used only if those without cannot carry
    a fit: such a step may hold a part of a prefill. `weight_bytes` and `kv_bytes_per_token` are
    those of one device, whose `ceilings` say how fast it reads weights at best.
    """
    usable = _usable(found)
    if _missing(usable):
        return None
    rows = _rows(usable)
    groups = np.unique(rows.group)
    all_once = np.ones((1, len(groups)))
    random = np.random.default_rng(seed)
    drawn = random.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), RESAMPLES)
    (parts,) = _fit(rows, all_once)
    resampled = _fit(rows, drawn.astype(np.float64))
    tail = _expanded_tail(len(groups))
    bounds = np.quantile(resampled, (tail, 1 - tail), axis=0)
    fixed_s, per_sequence_s, per_kv_token_s = (
        Interval(
            estimate=float(estimate),
            low=float(min(low, estimate)),
            high=float(max(high, estimate)),
            unit=unit,
            confidence=CONFIDENCE,
            repeats=len(groups),
            method="bootstrap over groups of steps",
        )
        for estimate, low, high, unit in zip(
            parts, *bounds, ("s", "s/sequence", "s/token"), strict=True
        )
    )
    predicted_s = _design(usable) @ parts
    return StepTimeModel(
        source=source,
        fixed_s=fixed_s,
        per_sequence_s=per_sequence_s,
        per_kv_token_s=per_kv_token_s,
        observations=len(usable),
        error_share=float(np.median(np.abs(usable.step_s - predicted_s) / usable.step_s)),
        weight_read_s=_weight_read_s(fixed_s, weight_bytes, ceilings),
        kv_bytes_per_s=_bandwidth(per_kv_token_s, kv_bytes_per_token),
    )


def _usable(found: Observations) -> Observations:
    clear = found.where(found.is_clear)
    return found if _missing(clear) else clear


def _missing(found: Observations) -> tuple[str, ...]:
    if len(found) == 0:
        return ("no step was seen in which requests only decoded",)
    groups = len(np.unique(found.group))
    if groups < MIN_GROUPS:
        return (
            f"decode steps were seen in {groups} stretches of the run, {MIN_GROUPS} are needed",
        )
    missing = []
    for name, values in (
        ("sequences that decode together", found.sequences),
        ("resident tokens", found.resident_tokens),
    ):
        # Tails of a run, with a few steps each, are no spread to fit a line to.
        low, high = np.quantile(values, (0.02, 0.98))
        if high < MIN_SPREAD * low:
            missing.append(f"the number of {name} hardly varied ({low:,.0f} to {high:,.0f})")
    if not missing and _condition(_rows(found)) > MAX_CONDITION:
        missing.append("resident tokens rose and fell with the number of sequences")
    return tuple(missing)


def _condition(rows: _Rows) -> float:
    """Condition number of the design as it is weighted, with columns of length 1."""
    weighted = rows.design * np.sqrt(rows.weight)[:, None] / rows.step_s[:, None]
    return float(np.linalg.cond(weighted / np.linalg.norm(weighted, axis=0)))


def _design(found: Observations) -> Floats:
    """(observations, 3): one, sequences, resident tokens."""
    return np.column_stack((np.ones(len(found)), found.sequences, found.resident_tokens))


def _rows(found: Observations) -> _Rows:
    """Put together what a group saw at one batch size and about the same resident tokens."""
    bins = np.log(np.maximum(found.resident_tokens, 1.0)) / math.log(CELL_RATIO)
    size = bins.astype(np.int64)
    cell = (found.group * (1 + found.sequences.max()) + found.sequences) * (1 + size.max()) + size
    order = np.argsort(cell, kind="stable")
    cells = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
    design = _design(found)
    middle = np.array([design[members].mean(axis=0) for members in cells])
    # A step shows once in every sequence of its batch.
    steps = np.array([len(members) for members in cells]) / middle[:, 1]
    return _Rows(
        design=middle,
        step_s=np.array([np.median(found.step_s[members]) for members in cells]),
        weight=np.minimum(steps, ENOUGH_STEPS),
        group=np.array([found.group[members[0]] for members in cells]),
    )


def _fit(rows: _Rows, drawn: Floats) -> Floats:
    """Huber's regression of each resample; `drawn` is (resamples, groups), how often each counts.

    Returns (resamples, 3).
    """
    weight = rows.weight * drawn[:, np.searchsorted(np.unique(rows.group), rows.group)]
    scale_s = np.broadcast_to(rows.step_s, weight.shape)
    robust = np.ones_like(weight)
    for _ in range(_ROUNDS):
        parts = _least_squares(rows, weight * robust / scale_s**2)
        # Relative to the prediction: relative to what was seen, low outliers would weigh most.
        scale_s = np.maximum(parts @ rows.design.T, 1e-9)
        error = np.abs(rows.step_s / scale_s - 1)
        deviation = 1.4826 * np.median(error, axis=1, keepdims=True)
        limit = HUBER_K * np.maximum(deviation, 1e-9)
        robust = np.minimum(1.0, limit / np.maximum(error, 1e-12))
    return parts


def _least_squares(rows: _Rows, weight: Floats) -> Floats:
    """Weighted least squares with no negative part, exact: the best of all sets of parts above 0.

    `weight` is (resamples, rows); returns (resamples, 3).
    """
    unit = rows.design.max(axis=0)
    design = rows.design / unit
    squares = np.einsum("br,ri,rj->bij", weight, design, design, optimize=True)
    products = np.einsum("br,ri,r->bi", weight, design, rows.step_s, optimize=True)
    # A resample may miss all that tells two parts apart; this decides it without moving others.
    ridge = 1e-10 * np.trace(squares, axis1=1, axis2=2)[:, None, None] * np.eye(_TERMS)
    best: Floats = np.zeros_like(products)
    least = np.zeros(len(products))
    for free in product((True, False), repeat=_TERMS):
        mask = np.array(free)
        both = mask[:, None] & mask[None, :]
        system = np.where(both, squares + ridge, np.eye(_TERMS))
        parts = np.linalg.solve(system, (products * mask)[..., None])[..., 0]
        loss = np.einsum("bi,bij,bj->b", parts, squares, parts) - 2 * np.sum(parts * products, 1)
        better = (parts >= 0).all(axis=1) & (loss < least)
        best[better], least[better] = parts[better], loss[better]
    fitted: Floats = best / unit
    return fitted


def _expanded_tail(groups: int) -> float:
    """The percentile at which a bootstrap over few groups has its 2.5% bound."""
    freedom = groups - _TERMS
    quantile = t_quantile(0.5 + CONFIDENCE / 2, freedom)
    return NormalDist().cdf(-quantile * math.sqrt(groups / freedom))


def _weight_read_s(
    fixed_s: Interval, weight_bytes: int | None, ceilings: Ceilings | None
) -> float | None:
    if weight_bytes is None or ceilings is None:
        return None
    return min(weight_bytes / ceilings.read_bytes_per_s, fixed_s.estimate)


def _bandwidth(per_kv_token_s: Interval, kv_bytes_per_token: float | None) -> Interval | None:
    """Bytes a second at which KV is read in effect; no upper bound where its time may be 0."""
    if not kv_bytes_per_token or per_kv_token_s.estimate <= 0:
        return None
    return per_kv_token_s.model_copy(
        update={
            "estimate": kv_bytes_per_token / per_kv_token_s.estimate,
            "low": kv_bytes_per_token / per_kv_token_s.high if per_kv_token_s.high else None,
            "high": kv_bytes_per_token / per_kv_token_s.low if per_kv_token_s.low else None,
            "unit": "bytes/s",
        }
    )
