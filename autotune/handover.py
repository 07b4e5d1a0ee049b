"""From a finished study to the serving config of one of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from pydantic import JsonValue

import kvtune
from kvtune.autotune.decide import figures_of
from kvtune.autotune.quality.words import NOT_ASKED, SUMMARY_START, summary
from kvtune.errors import NotFound
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow, TrialRow
from kvtune.types import Decision, Harm, Interval, Outcome, ServingConfig, Setting


def serving_config(store: Store, study: StudyRow, number: int | None = None) -> ServingConfig:
    """The config of a trial, or of the recommended one.

    Raises:
        NotFound: the study has no decision or no such trial.
    """
    decision = store.decision(study)
    if number is None:
        if decision is None or decision.recommended is None:
            raise NotFound(
                f"study {study.name} recommends nothing yet",
                fix="run its search to the end, or name a trial: --study STUDY/NUMBER",
            )
        number = decision.recommended
    trial = store.trial(study, number)
    chosen = decision is not None and decision.recommended == number
    if decision is not None and chosen:
        figures, stock = dict(decision.figures), dict(decision.baseline_figures)
    else:
        figures, stock = _searched(study, trial), _searched(study, store.trial(study, 0))
    served = study.settings.get("served_model_name")
    environment = study.settings.get("environment")
    return ServingConfig(
        study=study.name,
        trial=number,
        outcome=decision.outcome if decision is not None and chosen else None,
        model=study.model,
        served_model_name=served if isinstance(served, str) else None,
        engine=study.engine,
        device=study.device,
        settings=tuple(_settings(study, trial)),
        environment={str(k): str(v) for k, v in environment.items()}
        if isinstance(environment, Mapping)
        else {},
        goal=study.goal,
        figures=figures,
        baseline_figures=stock,
        warnings=_warnings(store, trial, decision, chosen=chosen),
        revert_arguments=dict(study.base_arguments),
        kvtune_version=kvtune.__version__,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _settings(study: StudyRow, trial: TrialRow) -> list[Setting]:
    tuned: dict[str, tuple[JsonValue, str]] = {}
    for choice in trial.trial.stack.choices:
        for name, value in choice.arguments.items():
            tuned[name] = (value, choice.because)
    settings = [
        Setting(name=name, value=value, because=because, origin="tuned")
        for name, (value, because) in tuned.items()
    ]
    settings += [
        Setting(name=name, value=value, because="given for every trial", origin="base")
        for name, value in study.base_arguments.items()
        if name not in tuned
    ]
    return settings


def _searched(study: StudyRow, trial: TrialRow) -> dict[str, Interval]:
    return {} if trial.measurement is None else figures_of(study.goal, trial.measurement)


def _warnings(
    store: Store, trial: TrialRow, decision: Decision | None, *, chosen: bool
) -> tuple[str, ...]:
    rounds = [row for row in store.trials(trial.study) if row.trial.parent == trial.number]
    measurements = [row.measurement for row in (trial, *rounds) if row.measurement is not None]
    warnings = [warning for measurement in measurements for warning in measurement.warnings]
    if not chosen:
        warnings.append("this trial is not the one that the study recommends")
    if trial.measurement is None or trial.measurement.failure is not None:
        warnings.append("this trial has no measurement: nothing is known about how it serves")
    if trial.trial.stack.harm is not Harm.LOSSLESS:
        warnings.append(
            f"these settings are {trial.trial.stack.harm}: answers can differ from stock; "
            f"{_quality(store, trial)}"
        )
    if decision is not None and chosen:
        warnings += [
            reason
            for reason in decision.reasons
            if (decision.outcome is not Outcome.WINNER or "confirmed" in reason)
            and not reason.startswith(SUMMARY_START)
        ]
    return tuple(dict.fromkeys(warnings))


def _quality(store: Store, trial: TrialRow) -> str:
    """What is known of a trial's answers, the newest report."""
    reports = store.quality_reports(trial.study, trial.number)
    if not reports:
        return NOT_ASKED
    return f"{summary(reports[0].report)} (kvtune history quality {reports[0].id[:8]})"
