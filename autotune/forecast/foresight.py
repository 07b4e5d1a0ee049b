"""Forecasts of a search: told before each trial, and measured by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from kvtune.autotune.forecast.experience import experience_of
from kvtune.autotune.forecast.levers import lever_of
from kvtune.autotune.forecast.predict import CAPACITY, SIMULATED, Forecaster, make_forecaster
from kvtune.errors import BadInput
from kvtune.policies.base import Context
from kvtune.policies.stack import describe
from kvtune.profilers.measure import LoadPlan
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Device,
    EngineInfo,
    Goal,
    LoadRun,
    Measurement,
    PolicyStack,
    Request,
    Status,
    StepTimeModel,
    Trial,
    fingerprint_of,
)


def subject_key(
    *,
    model: str,
    engine: EngineInfo,
    device: Device,
    workload_digest: str,
    plan: LoadPlan,
    goal: Goal,
) -> str:
    """Identify what a forecast is told for: all that its figures depend on but the arguments.

    Of the engine that is its version: a server that kvtune attached to tells nothing else.
    """
    return fingerprint_of(
        {
            "model": model,
            "engine": engine.version,
            "device": device.key,
            "workload": workload_digest,
            "plan": dict(plan.key()),
            "goal": goal.model_dump(mode="json"),
        }
    )


@dataclass(slots=True)
class Foresight:
    """Tells, and keeps, what each trial of a study should give, and what it gave.

    `subjects` has one for each name of the model; what is told here is for the first. Nothing is
    told before `learn` has seen the baseline's load, nor if that cannot be simulated.
    """

    store: Store
    study: StudyRow
    plan: LoadPlan
    subjects: tuple[str, ...]
    _forecaster: Forecaster | None = None
    _baseline: Measurement | None = None

    def learn(
        self,
        requests: Sequence[Request],
        run: LoadRun,
        found: Measurement,
        context: Context,
        step_time: StepTimeModel | None,
    ) -> None:
        """Look at the baseline: one `run` of the load on it, and what was `found` in all."""
        self._baseline = found
        with suppress(BadInput):
            self._forecaster = make_forecaster(
                requests,
                self.plan,
                run,
                self.study.goal,
                context,
                step_time,
                found.metrics,
                experience_of(self.store, self.study.device, self.study.engine),
            )

    @property
    def forecaster(self) -> Forecaster | None:
        """What simulates the baseline's load; None before it was learnt, or if it cannot be."""
        return self._forecaster

    def tell(self, stack: PolicyStack) -> None:
        """Forecast a stack that is about to be measured."""
        if self._forecaster is None or not stack.arguments:
            return
        text = describe(stack)
        lever = lever_of(
            stack.arguments,
            self._forecaster.context,
            name=text,
            says=f"sets {text}",
            experience=self._forecaster.experience,
        )
        self.store.save_forecasts(self.subjects[0], self._forecaster.forecast(lever))

    def measured(self, trial: Trial, found: Measurement) -> None:
        """Note what a trial gave beside the baseline of its study."""
        if self._baseline is None or found.status is not Status.OK:
            return
        before, after = _figures(self._baseline), _figures(found)
        pairs = {name: (after[name], before[name]) for name in before if name in after}
        if not pairs:
            return
        for subject in self.subjects:
            self.store.score_forecasts(
                subject, trial.arguments, pairs, study=self.study.name, trial=trial.number
            )


def foresight_of(store: Store, study: StudyRow, plan: LoadPlan) -> Foresight:
    """The foresight of a study whose requests are sent as `plan` says.

    A profile of a server whose checkpoint nobody named knows the model by the name it is served as.
    """
    served_name = study.settings.get("served_model_name")
    names = [study.model, *([served_name] if isinstance(served_name, str) else [])]
    subjects = tuple(
        subject_key(
            model=name,
            engine=study.engine,
            device=study.device,
            workload_digest=study.fingerprint.digest,
            plan=plan,
            goal=study.goal,
        )
        for name in dict.fromkeys(names)
    )
    return Foresight(store, study, plan, subjects)


def _figures(found: Measurement) -> Mapping[str, float]:
    """The means of what is forecast, as far as it was measured."""
    figures = {name: fmean(found.metrics[name]) for name in SIMULATED if found.metrics.get(name)}
    tokens = _capacity_tokens(found)
    return figures if tokens is None else {**figures, CAPACITY: float(tokens)}


def _capacity_tokens(found: Measurement) -> int | None:
    effective = found.effective
    if effective is None:
        return None
    if effective.plugin and "streaming_llm" in effective.plugin:
        # The same blocks hold more requests, and vLLM reports it.
        return effective.kv_cache_size_tokens
    if effective.num_gpu_blocks is not None and effective.block_size_tokens is not None:
        return effective.num_gpu_blocks * effective.block_size_tokens
    return effective.kv_cache_size_tokens
