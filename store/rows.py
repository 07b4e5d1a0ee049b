"""What the store hands out: one row of each table, and the views put together from them.

Row models name their fields after the columns of their table, so that a row is read, exported and
imported by the same names. Times are ISO 8601 in UTC with microseconds, which sort as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pydantic import Field, JsonValue

from kvtune.store.schema import compress
from kvtune.types import (
    Ceilings,
    Decision,
    Device,
    EngineInfo,
    Failure,
    FailureClass,
    Forecast,
    Goal,
    LoadRun,
    Measurement,
    Outcome,
    Profile,
    QualityReport,
    ServingConfig,
    Status,
    Stored,
    Trial,
    WorkloadFingerprint,
)


def now() -> str:
    """The current time as the store writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class AttemptStatus(StrEnum):
    """How one try at a trial stands."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    REUSED = "reused"


# --- one row of a table -----------------------------------------------------------------------


class Row(Stored):
    """A row whose fields are the columns of its table."""

    def columns(self) -> dict[str, Any]:
        """Column values by name, as they are written."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        del values["schema_version"]
        return {
            name: value.value if isinstance(value, StrEnum) else value
            for name, value in values.items()
        }


class StudyRow(Row):
    """A search: what was tuned, on what, for which goal, and the settings of measuring."""

    id: str
    name: str
    created_at: str
    kvtune_version: str
    model: str
    workload_name: str
    goal: Goal
    engine: EngineInfo
    device: Device
    fingerprint: WorkloadFingerprint
    base_arguments: dict[str, JsonValue]
    settings: dict[str, JsonValue]


class PlannedTrial(Row):
    """A trial as it was proposed. `key` identifies its point across studies."""

    study_id: str
    number: int
    created_at: str
    key: str
    trial: Trial
    optuna_number: int | None = None
    rung: int | None = None


class AttemptRow(Row):
    """One try at a trial, by which process; `measurement_id` is set when it gave a measurement.

    `process` tells the process from a later one that was given the same `pid`.
    """

    id: str
    study_id: str
    number: int
    status: AttemptStatus
    host: str
    pid: int
    process: str
    started_at: str
    ended_at: str | None = None
    measurement_id: str | None = None


class MeasurementRow(Row):
    """A measurement without its failure, which has a row of its own, and without its metrics.

    The metrics stand apart from the rest, which holds every counter of the server, so that a list
    of studies can be made without reading megabytes.
    """

    id: str
    key: str
    status: Status
    created_at: str
    metrics: dict[str, tuple[float, ...]]
    details: Measurement
    figures: dict[str, JsonValue]

    def whole(self, failure: FailureRow | None) -> Measurement:
        """The measurement as it was saved."""
        return self.details.model_copy(
            update={"metrics": self.metrics, "failure": failure.failure_value if failure else None}
        )


class FailureRow(Row):
    """Why a measurement has no number."""

    measurement_id: str
    failure: FailureClass
    message: str
    fix: str
    log_excerpt: str

    @property
    def failure_value(self) -> Failure:
        """The failure as a measurement carries it."""
        return Failure(
            failure=self.failure,
            message=self.message,
            fix=self.fix,
            log_excerpt=self.log_excerpt,
        )


class RunRow(Row):
    """One repeat of a measurement with the raw record of every request."""

    measurement_id: str
    repeat: int
    requests: int
    failed_requests: int
    run: LoadRun

    def columns(self) -> dict[str, Any]:
        """Column values by name, the run compressed."""
        return {**super().columns(), "run": compress(self.run)}


class DecisionRow(Row):
    """What was decided at the end of a study; the newest one counts."""

    id: str
    study_id: str
    created_at: str
    decision: Decision


class StepRow(Row):
    """What a search said on the way to its decision, and about which trial, if about one.

    `step` is of what kind it is.
    """

    id: str
    study_id: str
    created_at: str
    step: str
    says: str
    trial: int | None = None


class ProfileRow(Row):
    """A profile of a workload on a server."""

    id: str
    created_at: str
    profile: Profile


class EmittedRow(Row):
    """A serving config that was written out. `files` maps each file name to its SHA-256.

    `study_id` is None when the config names a study that this store does not hold.
    """

    id: str
    study_id: str | None
    trial: int
    created_at: str
    format: str
    directory: str
    files: dict[str, str]
    config: ServingConfig


class CeilingsRow(Row):
    """What a device reached; the newest row of a device counts. `device` is its key."""

    id: str
    created_at: str
    device: str
    ceilings: Ceilings


class ForecastRow(Row):
    """What a lever was expected to do. `point` is where a trial has to be to measure it.

    `subject` is what it was told for: the model, the engine, the device, the workload and how it is
    sent. `point` is empty for levers that no trial can pull.
    """

    id: str
    created_at: str
    subject: str
    point: str
    forecast: Forecast


class ForecastOutcomeRow(Row):
    """What the first trial that measured a forecast found, beside its own study's baseline."""

    forecast_id: str
    created_at: str
    study: str
    trial: int
    measured: float
    measured_baseline: float


class QualityAnswersRow(Row):
    """What one configuration answered, as JSON of whoever asked.

    `key` identifies the configuration and the questions; the newest row of a key counts.
    """

    id: str
    created_at: str
    key: str
    answers: str


class QualityReportRow(Row):
    """A comparison of answers; `study_id` and `trial` are set when the candidate was a trial's."""

    id: str
    created_at: str
    study_id: str | None
    trial: int | None
    report: QualityReport


# --- views ------------------------------------------------------------------------------------


class TrialRow(Stored):
    """A trial with what came of it. `attempts` are in the order in which they began.

    `measurement` is the newest that was not stopped, else the newest, else None. `figures` are what
    was saved beside it.
    """

    study: str
    number: int
    key: str
    trial: Trial
    optuna_number: int | None
    rung: int | None
    attempts: tuple[AttemptRow, ...]
    measurement: Measurement | None
    measurement_id: str | None
    figures: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether the trial has an outcome; one that was only stopped has none."""
        return self.measurement is not None and self.measurement.status is not Status.STOPPED

    @property
    def measured_by(self) -> str:
        """Which process, of which host, the measurement is of; empty without any."""
        return next(
            (
                f"{attempt.host}/{attempt.pid}/{attempt.process}"
                for attempt in self.attempts
                if attempt.measurement_id is not None
                and attempt.measurement_id == self.measurement_id
            ),
            "",
        )


class StudySummary(Stored):
    """One line about a study.

    `trials` counts its trials by status; besides the statuses of a measurement there is "running".
    `best_objective` is the mean over the repeats of `best_trial`, in the unit of
    `objective_metric`; it is None until a trial succeeded.
    """

    name: str
    created_at: str
    model: str
    engine: EngineInfo
    device: Device
    workload_name: str
    goal: Goal
    trials: dict[str, int]
    objective_metric: str
    best_trial: int | None
    best_objective: float | None
    outcome: Outcome | None
    recommended: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """What a reference names: a study, or one trial of it."""

    study: StudyRow
    trial: TrialRow | None = None


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did: rows added and rows already known, both by kind.

    `renamed` maps the name of a study in the file to its name in the store, for studies whose name
    another study has here.
    """

    added: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
