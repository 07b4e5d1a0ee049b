"""Attempts: who measures which trial, and what it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import uuid4

from pydantic import JsonValue
from sqlalchemy import Connection, insert, select, update

from kvtune.errors import StoreError
from kvtune.store.process import host_name, own_pid, process_identity
from kvtune.store.reading import all_rows, first_row
from kvtune.store.rows import (
    AttemptRow,
    AttemptStatus,
    FailureRow,
    MeasurementRow,
    PlannedTrial,
    RunRow,
    StudyRow,
    now,
)
from kvtune.store.schema import attempts, failures, measurements, runs, studies, trials
from kvtune.store.trials import TrialLog, known_measurement
from kvtune.types import Failure, LoadRun, Measurement, Status, Trial


class AttemptLog(TrialLog):
    """The attempts at the trials of a store. A study is given by its row or its name."""

    def begin_attempt(
        self,
        study: StudyRow | str,
        trial: Trial,
        key: str,
        *,
        optuna_number: int | None = None,
        rung: int | None = None,
    ) -> str:
        """Record that this process begins to measure a trial; returns the id of the attempt.

        Raises:
            StoreError: the study has another trial of that number.
        """
        with self.write() as connection:
            planned = self._plan(connection, study, trial, key, optuna_number, rung)
            attempt = _new_attempt(planned, AttemptStatus.RUNNING, None)
            connection.execute(insert(attempts).values(attempt.columns()))
        return attempt.id

    def finish_attempt(
        self,
        attempt: str,
        measurement: Measurement,
        runs: Sequence[LoadRun],
        *,
        figures: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Save what an attempt gave, with the raw records of each repeat, all or nothing.

        A failure is saved the same way. `figures` are kept beside the measurement.

        Raises:
            StoreError: the attempt is unknown, or has given a measurement already.
        """
        row = MeasurementRow(
            id=uuid4().hex,
            key="",
            status=measurement.status,
            created_at=now(),
            metrics=measurement.metrics,
            details=measurement.model_copy(update={"metrics": {}, "failure": None}),
            figures=dict(figures or {}),
        )
        repeats = [_run_row(row.id, repeat, run).columns() for repeat, run in enumerate(runs)]
        stopped = measurement.status is Status.STOPPED
        with self.write() as connection:
            row = row.model_copy(update={"key": self._key_of(connection, attempt)})
            _insert_measurement(connection, row, measurement.failure, repeats)
            connection.execute(
                update(attempts)
                .where(attempts.c.id == attempt)
                .values(
                    status=(AttemptStatus.STOPPED if stopped else AttemptStatus.FINISHED).value,
                    ended_at=row.created_at,
                    measurement_id=row.id,
                )
            )

    def reuse(
        self,
        study: StudyRow | str,
        trial: Trial,
        key: str,
        *,
        optuna_number: int | None = None,
        rung: int | None = None,
    ) -> Measurement | None:
        """Let the measurement that is known of a point be that of a trial too.

        Returns None, and records nothing, when the point is not known.

        Raises:
            StoreError: the study has another trial of that number.
        """
        with self.write() as connection:
            found = known_measurement(connection, key)
            if found is None:
                return None
            row, measurement = found
            planned = self._plan(connection, study, trial, key, optuna_number, rung)
            attempt = _new_attempt(planned, AttemptStatus.REUSED, row.id)
            connection.execute(insert(attempts).values(attempt.columns()))
        return measurement

    def abandon_running(self, study: StudyRow | str, *, other_hosts: bool = False) -> list[Trial]:
        """Stop the attempts of processes that no longer live; returns their unmeasured trials.

        Attempts of other hosts cannot be checked and are left alone, unless `other_hosts` says
        that nothing runs there any more.
        """
        with self.write() as connection:
            study_id = self._study_id(connection, study)
            running = select(attempts).where(
                attempts.c.study_id == study_id,
                attempts.c.status == AttemptStatus.RUNNING.value,
            )
            dead = [
                attempt
                for attempt in all_rows(connection, AttemptRow, running)
                if _is_dead(attempt, other_hosts)
            ]
            connection.execute(
                update(attempts)
                .where(attempts.c.id.in_([attempt.id for attempt in dead]))
                .values(status=AttemptStatus.STOPPED.value, ended_at=now())
            )
        numbers = {attempt.number for attempt in dead}
        return [
            row.trial for row in self.trials(study) if row.number in numbers and not row.measured
        ]

    def _plan(
        self,
        connection: Connection,
        study: StudyRow | str,
        trial: Trial,
        key: str,
        optuna_number: int | None,
        rung: int | None,
    ) -> PlannedTrial:
        """The row of a trial, written when the study does not have it yet."""
        study_id = self._study_id(connection, study)
        # Two searches of one study that propose the same number take turns.
        connection.execute(select(studies.c.id).where(studies.c.id == study_id).with_for_update())
        same_number = (trials.c.study_id == study_id) & (trials.c.number == trial.number)
        found = first_row(connection, PlannedTrial, select(trials).where(same_number))
        if found is None:
            found = PlannedTrial(
                study_id=study_id,
                number=trial.number,
                created_at=now(),
                key=key,
                trial=trial,
                optuna_number=optuna_number,
                rung=rung,
            )
            connection.execute(insert(trials).values(found.columns()))
        if found.trial != trial or found.key != key:
            raise StoreError(
                f"trial {trial.number} of this study has been recorded as another point",
                "the engine, the workload or the settings have changed: begin another study",
            )
        return found

    def _key_of(self, connection: Connection, attempt: str) -> str:
        """The key of the point that an attempt measures."""
        row = first_row(connection, AttemptRow, select(attempts).where(attempts.c.id == attempt))
        if row is None:
            raise StoreError(f"there is no attempt {attempt!r} in {self.location}")
        if row.measurement_id is not None:
            raise StoreError(f"attempt {attempt!r} has been finished before")
        same_trial = (trials.c.study_id == row.study_id) & (trials.c.number == row.number)
        key: str = connection.execute(select(trials.c.key).where(same_trial)).scalar_one()
        return key


def _new_attempt(
    planned: PlannedTrial, status: AttemptStatus, measurement_id: str | None
) -> AttemptRow:
    began = now()
    pid = own_pid()
    return AttemptRow(
        id=uuid4().hex,
        study_id=planned.study_id,
        number=planned.number,
        status=status,
        host=host_name(),
        pid=pid,
        process=process_identity(pid) or "",
        started_at=began,
        ended_at=None if status is AttemptStatus.RUNNING else began,
        measurement_id=measurement_id,
    )


def _is_dead(attempt: AttemptRow, other_hosts: bool) -> bool:
    if attempt.host != host_name():
        return other_hosts
    return process_identity(attempt.pid) != attempt.process


def _run_row(measurement_id: str, repeat: int, run: LoadRun) -> RunRow:
    return RunRow(
        measurement_id=measurement_id,
        repeat=repeat,
        requests=len(run.records),
        failed_requests=sum(not record.ok for record in run.records),
        run=run,
    )


def _insert_measurement(
    connection: Connection,
    row: MeasurementRow,
    failure: Failure | None,
    repeats: Sequence[Mapping[str, object]],
) -> None:
    connection.execute(insert(measurements).values(row.columns()))
    if failure is not None:
        why = FailureRow(
            measurement_id=row.id,
            failure=failure.failure,
            message=_without_nul(failure.message),
            fix=_without_nul(failure.fix),
            log_excerpt=_without_nul(failure.log_excerpt),
        )
        connection.execute(insert(failures).values(why.columns()))
    for repeat in repeats:
        connection.execute(insert(runs).values(repeat))


def _without_nul(text: str) -> str:
    # A log may hold NUL characters, which PostgreSQL's text cannot.
    return text.replace("\0", "\ufffd")
