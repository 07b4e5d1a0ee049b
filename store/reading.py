"""From result rows to row models, and which measurement speaks for a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, select

from kvtune.store.rows import AttemptRow, FailureRow, MeasurementRow, Row
from kvtune.store.schema import failures, measurements
from kvtune.types import Measurement, Status

R = TypeVar("R", bound=Row)

# A measurement beside its failure, for queries to narrow.
measured = select(measurements, failures).join_from(measurements, failures, isouter=True)


def all_rows(connection: Connection, model: type[R], query: Select[Any]) -> Iterator[R]:
    """The rows that `query` selects from the table of `model`."""
    for row in connection.execute(query):
        yield model(**row._mapping)


def first_row(connection: Connection, model: type[R], query: Select[Any]) -> R | None:
    """The first row that `query` selects from the table of `model`."""
    return next(all_rows(connection, model, query.limit(1)), None)


def measurements_of(
    connection: Connection, query: Select[Any]
) -> Iterator[tuple[MeasurementRow, Measurement]]:
    """Rows of `measured`, each with the whole measurement."""
    for row in connection.execute(query):
        columns = {column.name: row._mapping[column] for column in measurements.c}
        failure = {column.name: row._mapping[column] for column in failures.c}
        measurement = MeasurementRow(**columns)
        has_failed = failure["measurement_id"] is not None
        yield measurement, measurement.whole(FailureRow(**failure) if has_failed else None)


def telling_measurement(
    attempts: Sequence[AttemptRow], statuses: Mapping[str, Status]
) -> str | None:
    """The id of the measurement that speaks for a trial: the newest that was not stopped.

    `attempts` are in the order in which they began. When all were stopped it is the newest, and
    None when there is none.
    """
    made = [a.measurement_id for a in attempts if a.measurement_id is not None]
    ended = [id_ for id_ in made if statuses[id_] is not Status.STOPPED]
    return next(reversed(ended or made), None)
