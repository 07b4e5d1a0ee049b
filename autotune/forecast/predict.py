"""Forecasts: the ratio of two simulations, with the lever and without, times what was measured.

The ratio is taken for the requests in their own order with the best costs, and again for other
orders with costs at the ends of their intervals; the lowest and the highest bound what the model is
unsure of. The range is wider than that by the noise of the two measurements that a ratio is of, and
by what the model missed of the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from pydantic import JsonValue

from kvtune.autotune.forecast.calibrate import (
    FIRST_TOKEN,
    GOODPUT,
    STEP,
    Baseline,
    Calibration,
    calibrate,
)
from kvtune.autotune.forecast.counted import (
    counted_ratio,
    sequences_in,
    start_problem,
    system_with,
)
from kvtune.autotune.forecast.experience import WITHIN, Experience
from kvtune.autotune.forecast.levers import Lever, lever_of
from kvtune.autotune.forecast.read_times import UNCHANGED
from kvtune.autotune.forecast.reason import reason_of
from kvtune.autotune.forecast.replay import SimulatedRun, System, simulate
from kvtune.autotune.forecast.requests import SimulatedRequest, shuffled, simulated_requests
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of, token_bytes
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.method import History
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.scrape import ENGINES
from kvtune.types import Forecast, Goal, Interval, LoadRun, Request, StepTimeModel

CAPACITY, SEQUENCES = "capacity_tokens", "sequences"
SIMULATED: Mapping[str, str] = {STEP: "s", FIRST_TOKEN: "s", GOODPUT: "requests/s"}
"""The metrics that are simulated, with their units. A decode step is the median gap of tokens."""

CUT_TOKENS = 30_000
"""Output tokens after which a simulation ends: a tenth of a second."""

_READS = (1, 1, 1, 0, 2)
"""Which of a lever's read ratios (least, expected, most) goes with the best costs and each end."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """One order of the requests with one set of costs, and the baseline under both."""

    requests: Sequence[SimulatedRequest]
    cost: StepCost
    read: int
    figures: Mapping[str, float]


@dataclass(slots=True)
class Forecaster:
    """What is known of a baseline, ready to be asked about levers.

    `context` holds what the engine reported among its arguments, `arguments` those that the user
    named, and `mean` the mean prompt and output of a request.
    """

    baseline: Baseline
    calibration: Calibration
    context: Context
    arguments: Mapping[str, JsonValue]
    mean: History
    experience: Experience = field(default_factory=Experience)
    _draws: list[_Draw] = field(default_factory=list)

    def forecast(self, lever: Lever) -> tuple[Forecast, ...]:
        """What the lever would do to each metric: capacity, sequences, step, first token, goodput.

        A metric without a figure says in its reason why. One that was 0 has no ratio, and its
        range in the reason.
        """
        system = None
        if not lever.problem:
            system = system_with(lever, self.baseline.system, self.context)
        problem = lever.problem or start_problem(system, self.context)
        if problem or system is None:
            units = {CAPACITY: "tokens", SEQUENCES: "sequences", **SIMULATED}
            return tuple(self._blank(lever, metric, units[metric], problem) for metric in units)
        runs: list[SimulatedRun] = []
        try:
            for draw in self._drawn():
                cost = lever.cost(draw.cost, draw.read)
                loading = self._loading(lever, system, draw.read)
                runs.append(self._replay(draw.requests, loading, cost))
        except BadInput as error:
            problem = error.message
        ratios = {metric: self._ratio(metric, runs) for metric in SIMULATED if not problem}
        ranges = {
            metric: None if ratio is None else self._with_noise(metric, ratio)
            for metric, ratio in ratios.items()
        }
        reason = problem or reason_of(
            lever, self.baseline.system, system, self.calibration, runs[0], ratios, ranges
        )
        both = self.baseline.system, system
        tokens = [one.capacity_tokens for one in both]
        sequences = [sequences_in(one, self.mean) for one in both]
        found = [
            self._counted(lever, CAPACITY, "tokens", reason, *tokens),
            self._counted(lever, SEQUENCES, "sequences", reason, *sequences),
        ]
        for metric, unit in SIMULATED.items():
            why_not = problem or self.calibration.problem(metric)
            ratio = ranges.get(metric)
            if not why_not and self.calibration.is_zero(metric):
                found.append(self._from_zero(self._blank(lever, metric, unit, reason), runs))
                continue
            if why_not or ratio is None:
                why_not = why_not or "it was 0 in the simulated baseline"
                found.append(self._blank(lever, metric, unit, f"cannot forecast: {why_not}"))
                continue
            known = self.calibration.measured[metric]
            values = {"baseline": known, "predicted": known * ratio.estimate, "ratio": ratio}
            found.append(self._blank(lever, metric, unit, reason).model_copy(update=values))
        return tuple(found)

    def simulated(self, arguments: Mapping[str, JsonValue]) -> SimulatedRun | None:
        """Serve the requests, in their order and with the best costs, under engine arguments.

        They go on top of the baseline's. However far the model is from the baseline, it is asked:
        only ratios of what comes of it mean something. None where it does not know the arguments,
        or where no engine would serve the load under them.
        """
        lever = lever_of(arguments, self.context, name="", says="", experience=self.experience)
        system = None
        if not lever.problem:
            system = system_with(lever, self.baseline.system, self.context)
        if system is None or start_problem(system, self.context):
            return None
        cost = lever.cost(self.calibration.cost, _READS[0])
        with suppress(BadInput):
            return self._replay(
                self.baseline.requests, self._loading(lever, system, _READS[0]), cost
            )
        return None

    def _loading(self, lever: Lever, system: System, read: int) -> System:
        """The engine with what a tier takes to give a token back, and what sparse reads save."""
        if lever.saved_ratio != UNCHANGED:
            system = replace(system, saved_ratio=lever.saved_ratio[read])
        each = token_bytes(self.context)
        if lever.load_bytes_per_s is None or each is None:
            return system
        # Reads are dearest where loads are slowest.
        return replace(system, load_token_s=each / lever.load_bytes_per_s[2 - read])

    def _drawn(self) -> list[_Draw]:
        """The draws, made when they are first needed."""
        if not self._draws:
            reach = max(16, 2 * self.calibration.simulated.peak_running)
            costs = (self.calibration.cost, *self.calibration.ends)
            for seed, (cost, read) in enumerate(zip(costs, _READS, strict=True)):
                requests = shuffled(self.baseline.requests, reach, seed)
                done = self._replay(requests, self.baseline.system, cost)
                figures = measure(done.run, self.baseline.goal)
                self._draws.append(_Draw(requests, cost, read, figures))
        return self._draws

    def _replay(
        self, requests: Sequence[SimulatedRequest], system: System, cost: StepCost
    ) -> SimulatedRun:
        base = self.baseline
        return simulate(
            requests,
            base.arrivals,
            system,
            cost,
            until_ended=base.until_ended,
            together=base.together,
        )

    def _from_zero(self, blank: Forecast, runs: Sequence[SimulatedRun]) -> Forecast:
        """The goodput of a lever on a baseline where no request keeps the limits."""
        found = [measure(done.run, self.baseline.goal).get(blank.metric, 0.0) for done in runs]
        told = self._with_noise(blank.metric, _range_of(found, blank.unit))
        outcome = "stays at 0"
        if told.low is not None and told.high:
            outcome = f"0 to {told.estimate:.2g} {blank.unit} ({told.low:.2g} to {told.high:.2g})"
        reason = f"{blank.reason}; goodput {outcome}"
        figures = {"baseline": 0.0, "predicted": told.estimate, "reason": reason}
        return blank.model_copy(update=figures)

    def _ratio(self, metric: str, runs: Sequence[SimulatedRun]) -> Interval | None:
        ratios = []
        for draw, done in zip(self._drawn(), runs, strict=True):
            before = draw.figures.get(metric)
            after = measure(done.run, self.baseline.goal).get(metric)
            if not before or after is None:
                return None
            ratios.append(after / before)
        return _range_of(ratios, "ratio")

    def _with_noise(self, metric: str, ratio: Interval) -> Interval:
        """The range in which a measured ratio is to be expected."""
        if ratio.low is None or ratio.high is None:
            return ratio
        noise = self.calibration.noise.get(metric, 0.0)
        missed = self.calibration.missed.get(metric, 0.0)
        # A lever that changes nothing is not missed, however far off the baseline is.
        aside = math.hypot(
            NormalDist().inv_cdf(0.5 + WITHIN / 2) * math.sqrt(2) * noise,
            missed * min(1.0, abs(ratio.estimate - 1)),
        )
        middle = ratio.estimate
        seen = self.experience.errors.get(metric, 0.0)
        return ratio.model_copy(
            update={
                "low": min(
                    max(middle - math.hypot(middle - ratio.low, aside * middle), 0.0),
                    middle / (1 + seen),
                ),
                "high": max(
                    middle + math.hypot(ratio.high - middle, aside * middle), middle * (1 + seen)
                ),
                "method": f"{ratio.method}, with the noise of two measurements",
            }
        )

    def _counted(
        self, lever: Lever, metric: str, unit: str, reason: str, before: int, after: int
    ) -> Forecast:
        ratio = counted_ratio(before, after)
        values = {"baseline": before, "predicted": after, "ratio": ratio}
        return self._blank(lever, metric, unit, reason).model_copy(update=values)

    def _blank(self, lever: Lever, metric: str, unit: str, reason: str) -> Forecast:
        return Forecast(
            lever=lever.name,
            stack=lever.stack,
            arguments={**self.arguments, **lever.arguments},
            served_by="reference" if lever.not_served else "engine",
            metric=metric,
            unit=unit,
            reason=reason,
        )


def _range_of(values: Sequence[float], unit: str) -> Interval:
    """The first value, in the range of all."""
    return Interval(
        estimate=values[0],
        low=min(values),
        high=max(values),
        unit=unit,
        confidence=WITHIN,
        repeats=len(values),
        method="range over request orders and ends of step costs",
    )


def make_forecaster(
    requests: Sequence[Request],
    plan: LoadPlan,
    run: LoadRun,
    goal: Goal,
    context: Context,
    step_time: StepTimeModel | None,
    repeats: Mapping[str, Sequence[float]] | None = None,
    experience: Experience | None = None,
) -> Forecaster:
    """Prepare forecasts from a run of `requests`, sent as `plan` says, on the baseline.

    `repeats` are the metrics of all such runs, by name, where there were several. No range is
    narrower than what `experience` says of its metric.

    Raises:
        BadInput: the run or the server says too little to simulate it; the message says what.
    """
    if run.gauges.get(ENGINES):
        raise BadInput(
            "requests are spread over several engines", fix="forecast for one engine alone"
        )
    reported = as_reported(context)
    system = system_of(reported.base_arguments, reported)
    if system is None:
        raise BadInput("the size of the pool is not known", fix="name the model with --model")
    length = None if context.baseline is None else context.baseline.max_model_len_tokens
    found = simulated_requests(requests, plan, run.records, max_model_len_tokens=length)
    if not found:
        raise BadInput(
            "no request of the baseline completed", fix="send a load that the server can carry"
        )
    outputs = sum(request.output_tokens for request in found)
    ended = math.ceil(len(found) * min(1.0, CUT_TOKENS / outputs))
    baseline = Baseline(found, plan.arrivals, system, run, goal, ended, repeats or {})
    calibration = calibrate(baseline, step_time)
    return Forecaster(
        baseline=calibration.baseline,
        calibration=calibration,
        context=reported,
        arguments=context.base_arguments,
        mean=History(
            math.ceil(sum(request.prompt_tokens for request in found) / len(found)),
            math.ceil(outputs / len(found)),
        ),
        experience=experience or Experience(),
    )
