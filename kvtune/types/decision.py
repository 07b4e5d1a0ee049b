"""How a search ended, and what a person deploys."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from kvtune.types.base import Device, EngineInfo, Goal, Harm, Interval, Stored
from kvtune.types.front import Front


class Outcome(StrEnum):
    """How a search ended."""

    WINNER = "winner"
    KEEP_BASELINE = "keep-baseline"
    NO_CLEAR_WINNER = "no-clear-winner"
    INFEASIBLE = "infeasible"
    NOTHING_MEASURED = "nothing-measured"


class Regret(Stored):
    """How far the recommended point may be from the best one of the space.

    `within` maps "1%", "2%" and "5%" to the probability that no point is better by more than that.
    `bound_ratio` is by how much the best one is better at most, with 95% probability. `points` is
    how many were looked at, measured or not.
    """

    within: dict[str, float]
    bound_ratio: float
    points: int
    says: str


class Price(Stored):
    """What one rung of harm buys over the best below it, and what that costs in answers.

    `rung` is L0 (stock defaults), L1, L2 or L3, `trial` its best measured one, and `value` its
    objective in the search. `gain` is the ratio to trial `over`: without bounds where the two were
    measured apart, `None` where that has 0. `costs` maps figures ("fidelity/all kl") to the change
    from stock's answers. `proof` is empty where answers are computed as before, else it says
    whether limits on answers were shown to hold.
    """

    rung: str
    harm: Harm
    trial: int
    settings: str
    value: float
    over: int | None = None
    gain: Interval | None = None
    costs: dict[str, Interval] = Field(default_factory=dict)
    proof: str = ""
    says: str = ""


class Decision(Stored):
    """Which trial to ship and why; `recommended` is also set when there is no clear winner."""

    outcome: Outcome
    recommended: int | None
    baseline: int | None
    ties: tuple[int, ...] = ()
    figures: dict[str, Interval] = Field(default_factory=dict)
    baseline_figures: dict[str, Interval] = Field(default_factory=dict)
    gain_ratio: Interval | None = None
    reasons: tuple[str, ...] = ()
    rejected: dict[int, str] = Field(default_factory=dict)
    regret: Regret | None = None
    prices: tuple[Price, ...] = ()
    front: Front | None = None


class Setting(Stored):
    """One engine argument of a serving config and where it comes from."""

    name: str
    value: JsonValue
    because: str
    origin: Literal["tuned", "base"] = "tuned"


class ServingConfig(Stored):
    """What a person deploys: engine arguments with provenance and the measured evidence.

    `outcome` is None for a trial that a person picked and the study does not recommend.
    """

    study: str
    trial: int
    outcome: Outcome | None
    model: str
    served_model_name: str | None = None
    engine: EngineInfo
    device: Device
    settings: tuple[Setting, ...]
    environment: dict[str, str] = Field(default_factory=dict)
    goal: Goal
    figures: dict[str, Interval] = Field(default_factory=dict)
    baseline_figures: dict[str, Interval] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    revert_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    kvtune_version: str
    created_at: str
