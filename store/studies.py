"""Studies: begin one, find one, and one line about each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from uuid import uuid4

from pydantic import JsonValue
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

import kvtune
from kvtune.errors import BadInput, NotFound
from kvtune.store.connection import Database
from kvtune.store.reading import all_rows, first_row, telling_measurement
from kvtune.store.rows import AttemptRow, AttemptStatus, DecisionRow, StudyRow, StudySummary, now
from kvtune.store.schema import attempts, decisions, measurements, studies, trials
from kvtune.types import Device, EngineInfo, Goal, Status, WorkloadFingerprint


class StudyLog(Database):
    """The studies of a store."""

    def create_study(
        self,
        name: str,
        *,
        goal: Goal,
        model: str,
        engine: EngineInfo,
        device: Device,
        workload_name: str,
        fingerprint: WorkloadFingerprint,
        base_arguments: Mapping[str, JsonValue],
        settings: Mapping[str, JsonValue],
    ) -> StudyRow:
        """Begin a study. `settings` say how its trials are measured.

        Raises:
            BadInput: the name is taken, or cannot be a name.
        """
        check_name(name)
        row = StudyRow(
            id=uuid4().hex,
            name=name,
            created_at=now(),
            kvtune_version=kvtune.__version__,
            model=model,
            workload_name=workload_name,
            goal=goal,
            engine=engine,
            device=device,
            fingerprint=fingerprint,
            base_arguments=dict(base_arguments),
            settings=dict(settings),
        )
        with self.write() as connection:
            try:
                connection.execute(insert(studies).values(row.columns()))
            except IntegrityError as error:
                raise BadInput(
                    f"a study named {name!r} exists already in {self.location}",
                    "continue that study, or give this one another name",
                ) from error
        return row

    def study(self, name: str) -> StudyRow | None:
        """The study of exactly this name."""
        with self.read() as connection:
            return first_row(connection, StudyRow, select(studies).where(studies.c.name == name))

    def studies(self) -> list[StudySummary]:
        """One line about every study, the newest first."""
        newest_first = select(studies).order_by(studies.c.created_at.desc(), studies.c.id)
        with self.read() as connection:
            tries = _attempts_by_trial(connection)
            statuses, metrics = _statuses_and_metrics(connection)
            decided = {
                row.study_id: row
                for row in all_rows(
                    connection,
                    DecisionRow,
                    select(decisions).order_by(decisions.c.created_at, decisions.c.id),
                )
            }
            return [
                _summary(row, tries[row.id], statuses, metrics, decided.get(row.id))
                for row in all_rows(connection, StudyRow, newest_first)
            ]

    def studies_beside(self, study: StudyRow) -> list[StudyRow]:
        """The other studies of the same model, engine and device, the newest first.

        The version of the engine may be another one.
        """
        others = (
            select(studies)
            .where(studies.c.model == study.model, studies.c.id != study.id)
            .order_by(studies.c.created_at.desc(), studies.c.id)
        )
        with self.read() as connection:
            return [
                row
                for row in all_rows(connection, StudyRow, others)
                if row.engine.name == study.engine.name and row.device.key == study.device.key
            ]

    def _study_id(self, connection: Connection, study: StudyRow | str) -> str:
        """The id of a study given by its row or its name.

        Raises:
            NotFound: there is no study of that name.
        """
        if isinstance(study, StudyRow):
            return study.id
        found: str | None = connection.scalar(select(studies.c.id).where(studies.c.name == study))
        if found is None:
            raise NotFound(f"there is no study named {study!r} in {self.location}")
        return found


def check_name(name: str) -> None:
    """Raise BadInput when a study cannot have this name."""
    if not name or name != name.strip() or not name.isprintable() or "/" in name:
        raise BadInput(
            f"{name!r} cannot be the name of a study",
            "use printable characters without '/', and no space at either end",
        )
    if name == "latest":
        raise BadInput(
            "'latest' cannot be the name of a study: it stands for the newest one",
            "give it another name",
        )


def _attempts_by_trial(connection: Connection) -> dict[str, dict[int, list[AttemptRow]]]:
    """Attempts of every trial in the order in which they began, by study id and number."""
    found: dict[str, dict[int, list[AttemptRow]]] = defaultdict(dict)
    for study_id, number in connection.execute(select(trials.c.study_id, trials.c.number)):
        found[study_id][number] = []
    in_order = select(attempts).order_by(attempts.c.started_at, attempts.c.id)
    for attempt in all_rows(connection, AttemptRow, in_order):
        found[attempt.study_id][attempt.number].append(attempt)
    return found


def _statuses_and_metrics(
    connection: Connection,
) -> tuple[dict[str, Status], dict[str, dict[str, tuple[float, ...]]]]:
    """Statuses of all measurements and metrics of those that succeeded, by measurement id."""
    columns = select(measurements.c.id, measurements.c.status)
    statuses = {id_: Status(status) for id_, status in connection.execute(columns)}
    succeeded = measurements.c.status == Status.OK.value
    query = select(measurements.c.id, measurements.c.metrics).where(succeeded)
    return statuses, {row.id: row.metrics for row in connection.execute(query)}


def _summary(
    study: StudyRow,
    tries: Mapping[int, list[AttemptRow]],
    statuses: Mapping[str, Status],
    metrics: Mapping[str, Mapping[str, tuple[float, ...]]],
    decided: DecisionRow | None,
) -> StudySummary:
    metric = study.goal.objective_metric
    counts: dict[str, int] = defaultdict(int)
    objectives: dict[int, float] = {}
    for number, attempts_of_trial in sorted(tries.items()):
        measurement = telling_measurement(attempts_of_trial, statuses)
        counts[_standing(attempts_of_trial, measurement, statuses)] += 1
        values = metrics.get(measurement or "", {}).get(metric)
        if values:
            objectives[number] = fmean(values)
    best = max(objectives, key=lambda number: objectives[number], default=None)
    return StudySummary(
        name=study.name,
        created_at=study.created_at,
        model=study.model,
        engine=study.engine,
        device=study.device,
        workload_name=study.workload_name,
        goal=study.goal,
        trials=dict(counts),
        objective_metric=metric,
        best_trial=best,
        best_objective=None if best is None else objectives[best],
        outcome=decided.decision.outcome if decided else None,
        recommended=decided.decision.recommended if decided else None,
    )


def _standing(
    tries: list[AttemptRow], measurement: str | None, statuses: Mapping[str, Status]
) -> str:
    running = any(attempt.status is AttemptStatus.RUNNING for attempt in tries)
    if measurement is not None and statuses[measurement] is not Status.STOPPED:
        return statuses[measurement].value
    return AttemptStatus.RUNNING.value if running else Status.STOPPED.value
