"""Trials: what came of each, and what is known of its point already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, or_, select

from kvtune.errors import NotFound
from kvtune.store.reading import all_rows, measured, measurements_of, telling_measurement
from kvtune.store.rows import AttemptRow, MeasurementRow, PlannedTrial, RunRow, StudyRow, TrialRow
from kvtune.store.schema import attempts, failures, measurements, runs, studies, trials
from kvtune.store.studies import StudyLog
from kvtune.types import FailureClass, LoadRun, Measurement, RequestRecord, Status

# Trying again gives the same: the engine refuses the arguments, or they do not fit the device.
_DETERMINISTIC = (FailureClass.BAD_ARGUMENT.value, FailureClass.DOES_NOT_FIT.value)

_LARGEST = 2**31 - 1  # that a column for numbers can be compared with


class TrialLog(StudyLog):
    """The trials of a store. A study is given by its row or its name."""

    def known(self, key: str) -> Measurement | None:
        """The newest measurement of a point in any study that need not be made again.

        That is one that succeeded, or a failure that would come again: a bad argument, or a
        configuration that does not fit.
        """
        with self.read() as connection:
            found = known_measurement(connection, key)
        return found[1] if found else None

    def runs_of(self, key: str) -> list[LoadRun]:
        """The runs behind `known(key)`, one a repeat; empty when the point is not known."""
        with self.read() as connection:
            found = known_measurement(connection, key)
            return _runs(connection, found[0].id) if found else []

    def trials(self, study: StudyRow | str) -> list[TrialRow]:
        """Every trial of a study by number, with what came of it."""
        with self.read() as connection:
            return _trial_rows(connection, self._study_id(connection, study))

    def trial(self, study: StudyRow | str, number: int) -> TrialRow:
        """One trial of a study.

        Raises:
            NotFound: the study has no trial of that number.
        """
        with self.read() as connection:
            study_id = self._study_id(connection, study)
            rows = _trial_rows(connection, study_id, number) if number <= _LARGEST else []
        if not rows:
            name = study.name if isinstance(study, StudyRow) else study
            raise NotFound(f"study {name!r} has no trial {number}", "list its trials by number")
        return rows[0]

    def records(self, study: StudyRow | str, number: int) -> list[tuple[RequestRecord, ...]]:
        """The raw record of every request of a trial, one tuple a repeat.

        Raises:
            NotFound: the study has no trial of that number.
        """
        measurement_id = self.trial(study, number).measurement_id
        with self.read() as connection:
            return [run.records for run in _runs(connection, measurement_id or "")]


def known_measurement(
    connection: Connection, key: str
) -> tuple[MeasurementRow, Measurement] | None:
    """The newest measurement of a point that need not be made again, and its row."""
    need_not_repeat = or_(
        measurements.c.status == Status.OK.value, failures.c.failure.in_(_DETERMINISTIC)
    )
    newest = (
        measured.where(measurements.c.key == key, need_not_repeat)
        .order_by(measurements.c.created_at.desc(), measurements.c.id)
        .limit(1)
    )
    return next(measurements_of(connection, newest), None)


def _runs(connection: Connection, measurement_id: str) -> list[LoadRun]:
    query = select(runs).where(runs.c.measurement_id == measurement_id).order_by(runs.c.repeat)
    return [row.run for row in all_rows(connection, RunRow, query)]


def _trial_rows(connection: Connection, study_id: str, number: int | None = None) -> list[TrialRow]:
    """The trials of a study by number, or the one of that number."""
    study_name: str = connection.execute(
        select(studies.c.name).where(studies.c.id == study_id)
    ).scalar_one()
    which = trials.c.study_id == study_id
    tried = attempts.c.study_id == study_id
    if number is not None:
        which, tried = which & (trials.c.number == number), tried & (attempts.c.number == number)
    tries: dict[int, list[AttemptRow]] = defaultdict(list)
    in_order = select(attempts).where(tried).order_by(attempts.c.started_at, attempts.c.id)
    for attempt in all_rows(connection, AttemptRow, in_order):
        tries[attempt.number].append(attempt)
    of_these = measurements.c.id.in_(select(attempts.c.measurement_id).where(tried))
    found = {
        row.id: (row, measurement)
        for row, measurement in measurements_of(connection, measured.where(of_these))
    }
    in_order = select(trials).where(which).order_by(trials.c.number)
    return [
        _view(study_name, planned, tries[planned.number], found)
        for planned in all_rows(connection, PlannedTrial, in_order)
    ]


def _view(
    study_name: str,
    planned: PlannedTrial,
    tries: Sequence[AttemptRow],
    found: Mapping[str, tuple[MeasurementRow, Measurement]],
) -> TrialRow:
    telling = telling_measurement(tries, {id_: row.status for id_, (row, _) in found.items()})
    stored, measurement = found[telling] if telling else (None, None)
    return TrialRow(
        study=study_name,
        number=planned.number,
        key=planned.key,
        trial=planned.trial,
        optuna_number=planned.optuna_number,
        rung=planned.rung,
        attempts=tuple(tries),
        measurement=measurement,
        measurement_id=telling,
        figures=stored.figures if stored else {},
    )
