"""Who proposes the trials of a search: a model with or without simulations, or the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtune.autotune.explore.asking import SIMULATED_S
from kvtune.autotune.explore.base import Proposer
from kvtune.autotune.explore.candidates import size_of
from kvtune.autotune.explore.prior import simulated_by
from kvtune.autotune.explore.proposer import ModelProposer
from kvtune.autotune.explore.responses import noise_of_responses
from kvtune.autotune.forecast.predict import Forecaster
from kvtune.autotune.limits import ENOUGH, Also, Rules, Sampler
from kvtune.autotune.space import build_space
from kvtune.policies.base import Context
from kvtune.types import Goal

LARGE = 20_000
"""Points of a space beyond which a model without simulations sees too little of it."""


def proposer_by(
    rules: Rules, forecaster: Forecaster | None, goal: Goal, ctx: Context
) -> ModelProposer | None:
    """The proposer that `rules` ask for; None: Optuna's sampler.

    Args:
        rules: what may be tried, and who says what.
        forecaster: what simulates the baseline's load; None: nothing can.
        goal: what is searched for.
        ctx: what is known once the baseline was measured.
    """
    if rules.sampler is Sampler.TPE:
        return None
    is_blind = rules.sampler is Sampler.AUTO and forecaster is None
    if is_blind and size_of(build_space(ctx, harm=rules.max_harm)) > LARGE:
        return None
    return proposer_from(
        forecaster,
        goal,
        seed=rules.seed,
        patience_s=SIMULATED_S,
        also=rules.also,
        enough=rules.enough,
    )


def proposer_text(rules: Rules, forecaster: Forecaster | None, proposer: Proposer | None) -> str:
    """Who proposes the trials of a search, and what follows, for who reads of it.

    The arguments are those of `proposer_by`, and what it gave.
    """
    if proposer is not None and forecaster is not None:
        return "trials are proposed by the search's model, with simulations of the baseline's load"
    if proposer is not None:
        return "trials are proposed by the search's model, without simulations of this load"
    why = (
        "as it was asked for"
        if rules.sampler is Sampler.TPE
        else f"as the space has more than {LARGE:,} configurations and nothing simulates this load"
    )
    return (
        f"trials are proposed by Optuna's TPE sampler, {why}: it uses the whole budget, and there "
        "is no estimate of how far the choice may be from the best"
    )


def proposer_from(
    forecaster: Forecaster | None,
    goal: Goal,
    *,
    seed: int,
    patience_s: float = math.inf,
    also: Sequence[Also] = (),
    enough: float = ENOUGH,
) -> ModelProposer:
    """The model of a search whose baseline `forecaster` knows; without one nothing is told.

    `patience_s` is how long simulations may take before an answer, `also` what is wanted beside
    the goal's own objective, `enough` the expected loss at which it ends.
    """
    if forecaster is None:
        return ModelProposer(goal, seed=seed, patience_s=patience_s, also=also, enough=enough)
    return ModelProposer(
        goal,
        requests=len(forecaster.baseline.requests),
        foretell=simulated_by(forecaster),
        noise=noise_of_responses(forecaster.calibration.noise, goal),
        seed=seed,
        patience_s=patience_s,
        also=also,
        enough=enough,
    )
