"""What is learnt of a measurement: quantities that change smoothly where a goal's limits do not.

Goodput falls off a cliff where a latency passes its limit. So the rate of requests, the share of
good ones and each limited latency are learnt apart, all on scales on which effects add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvtune.autotune.forecast.calibrate import FIRST_TOKEN, STEP, THROUGHPUT
from kvtune.profilers.goal import slo_key
from kvtune.types import Goal

RATE, SHARE = "rate", "share"
"""Log of requests a second (or of the objective), and the log odds of a request to be good."""

LEAST_RATE = 0.01
"""Requests a second below which all are equally bad."""


def responses_of(figures: Mapping[str, float], goal: Goal, requests: int) -> dict[str, float]:
    """Each response that `figures` tell: `RATE`, `SHARE`, and log of value over limit by SLO key.

    Args:
        figures: means of metrics by flat name.
        goal: whose objective and limits count.
        requests: how many a run had; a share is known to half of one.
    """
    found = {}
    share = figures.get("good_share_ratio")
    rate = figures.get("requests_per_s")
    split = goal.objective == "goodput" and bool(goal.slos) and share is not None
    if split and rate is not None and share is not None:
        half = 0.5 / requests
        inside = min(max(share, half), 1 - half)
        found[SHARE] = math.log(inside / (1 - inside))
    else:
        rate = figures.get(goal.objective_metric)
    if rate is not None:
        found[RATE] = math.log(max(rate, LEAST_RATE))
    for slo in goal.slos:
        value = figures.get(slo_key(slo))
        if value is not None and value > 0:
            found[slo_key(slo)] = math.log(value / slo.limit_s)
    return found


def noise_of_responses(noise: Mapping[str, float], goal: Goal) -> dict[str, float]:
    """The standard deviation of one measurement of each response that `noise` tells.

    Args:
        noise: of metrics by flat name, as a share of each (`Calibration.noise`).
        goal: whose limits count.
    """
    behind = {RATE: THROUGHPUT}
    for slo in goal.slos:
        behind[slo_key(slo)] = {"ttft": FIRST_TOKEN, "e2e": THROUGHPUT}.get(slo.metric, STEP)
    return {name: noise[metric] for name, metric in behind.items() if metric in noise}


def score(responses: Mapping[str, float]) -> float:
    """How good responses are if they are exact: log of the objective, less what limits are missed.

    A limit that is missed by 10% weighs as much as a third of the objective.
    """
    odds = responses.get(SHARE)
    good = 0.0 if odds is None else -math.log1p(math.exp(-odds))
    missed = sum(max(0.0, value) for name, value in responses.items() if name not in (RATE, SHARE))
    return responses.get(RATE, -math.inf) + good - 3 * missed
