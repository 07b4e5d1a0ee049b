"""A history as JSON lines, to move between stores and to keep.

The first line is a header; every other one is a row of a table with its `kind`. Rows carry ids that
are the same everywhere, so that importing a file again adds nothing. Attempts that still run are
not history yet and are left out, so that no line of an export ever changes later. Optuna's tables
are not part of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from pydantic import ValidationError
from sqlalchemy import Connection, Select, Table, and_, false, insert, select
from sqlalchemy.exc import DataError, IntegrityError

import kvtune
from kvtune.errors import BadInput
from kvtune.store.connection import Database
from kvtune.store.faults import disk_full, is_disk_full
from kvtune.store.reading import all_rows, first_row
from kvtune.store.rows import (
    AttemptRow,
    AttemptStatus,
    CeilingsRow,
    DecisionRow,
    EmittedRow,
    FailureRow,
    ForecastOutcomeRow,
    ForecastRow,
    ImportReport,
    MeasurementRow,
    PlannedTrial,
    ProfileRow,
    QualityAnswersRow,
    QualityReportRow,
    Row,
    RunRow,
    StepRow,
    StudyRow,
    now,
)
from kvtune.store.schema import (
    attempts,
    ceilings,
    decisions,
    emitted,
    failures,
    forecast_outcomes,
    forecasts,
    measurements,
    profiles,
    quality_answers,
    quality_reports,
    runs,
    steps,
    studies,
    trials,
)
from kvtune.store.studies import check_name
from kvtune.types import SCHEMA_VERSION, fingerprint_of

_HEADER = "kvtune-export"
_ROWS_IN_MEMORY = 16


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    table: Table
    model: type[Row]


# A row refers only to rows of kinds before its own.
_KINDS = (
    _Kind("study", studies, StudyRow),
    _Kind("trial", trials, PlannedTrial),
    _Kind("measurement", measurements, MeasurementRow),
    _Kind("failure", failures, FailureRow),
    _Kind("run", runs, RunRow),
    _Kind("attempt", attempts, AttemptRow),
    _Kind("decision", decisions, DecisionRow),
    _Kind("step", steps, StepRow),
    _Kind("profile", profiles, ProfileRow),
    _Kind("emitted", emitted, EmittedRow),
    _Kind("ceilings", ceilings, CeilingsRow),
    _Kind("forecast", forecasts, ForecastRow),
    _Kind("forecast outcome", forecast_outcomes, ForecastOutcomeRow),
    _Kind("quality answers", quality_answers, QualityAnswersRow),
    _Kind("quality report", quality_reports, QualityReportRow),
)
_BY_NAME = {kind.name: kind for kind in _KINDS}


def export_history(database: Database, stream: TextIO, study_id: str | None) -> int:
    """Write all rows, or those of one study, in an order that depends on nothing but the rows.

    Returns the number of rows, the header not counted.

    Raises:
        StoreError: the disk of the file is full.
    """
    count = 0
    try:
        stream.write(_line(_HEADER, {"kvtune_version": kvtune.__version__, "exported_at": now()}))
        for name, row in _rows(database, study_id):
            stream.write(_line(name, row.model_dump()))
            count += 1
        stream.flush()
    except OSError as error:
        if is_disk_full(error):
            raise disk_full("the export") from error
        raise
    return count


def import_history(database: Database, stream: Iterable[str]) -> ImportReport:
    """Add the rows of an export that are not here yet, all or nothing.

    Raises:
        BadInput: a line that is not of an export, or of a newer kvtune; the message names it.
    """
    added: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    renamed: dict[str, str] = {}
    with database.write() as connection:
        for number, line in _numbered(stream):
            try:
                kind, row = _parse(line)
                is_new = _add(connection, kind, row, renamed)
            except BadInput as error:
                raise BadInput(f"line {number}: {error.message}", error.fix) from error
            (added if is_new else skipped)[kind.name] += 1
    return ImportReport(added=dict(added), skipped=dict(skipped), renamed=renamed)


def _rows(database: Database, study_id: str | None) -> Iterator[tuple[str, Row]]:
    with database.read() as connection:
        streaming = connection.execution_options(yield_per=_ROWS_IN_MEMORY)
        for kind in _KINDS:
            query = _selected(kind.table, study_id).order_by(*kind.table.primary_key)
            for row in all_rows(streaming, kind.model, query):
                yield kind.name, row


def _selected(table: Table, study_id: str | None) -> Select[Any]:
    query = select(table)
    if table is attempts:
        query = query.where(attempts.c.status != AttemptStatus.RUNNING.value)
    if study_id is None:
        return query
    of_study = select(attempts.c.measurement_id).where(attempts.c.study_id == study_id)
    if table is studies:
        return query.where(studies.c.id == study_id)
    if table is measurements:
        return query.where(measurements.c.id.in_(of_study))
    if table in (failures, runs):
        return query.where(table.c.measurement_id.in_(of_study))
    if "study_id" not in table.c:
        return query.where(false())
    return query.where(table.c.study_id == study_id)


def _line(kind: str, fields: dict[str, Any]) -> str:
    line = {"kind": kind, "schema_version": SCHEMA_VERSION, **fields}
    return json.dumps(line, separators=(",", ":")) + "\n"


def _numbered(stream: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The lines after the header, with their number from 1."""
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                _check_header(line)
            elif line.strip():
                yield number, line
    except UnicodeDecodeError as error:
        raise BadInput(f"line {number + 1}: not UTF-8 text") from error
    if number == 0:
        raise BadInput("line 1: the file is empty", "give a file that `kvtune` has exported")


def _check_header(line: str) -> None:
    try:
        kind, _ = _fields(line)
    except BadInput as error:
        raise BadInput(f"line 1: {error.message}", error.fix) from error
    if kind != _HEADER:
        raise BadInput(
            "line 1: not the header of an export", "give a file that `kvtune` has exported"
        )


def _fields(line: str) -> tuple[str, dict[str, Any]]:
    """The kind and the other fields of a line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}", "export the history again") from error
    if not isinstance(fields, dict):
        raise BadInput("not a JSON object", "export the history again")
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadInput(
            f"written by a newer kvtune: its format is {version}, "
            f"this version knows up to {SCHEMA_VERSION}",
            "upgrade with `pip install -U kvtune`",
        )
    return str(fields.pop("kind", "")), fields


def _parse(line: str) -> tuple[_Kind, Row]:
    name, fields = _fields(line)
    kind = _BY_NAME.get(name)
    if kind is None:
        raise BadInput(f"unknown kind {name!r}", f"known are {', '.join(_BY_NAME)}")
    try:
        return kind, kind.model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{name}, {where}: {first['msg']}", "export the history again") from error


def _add(connection: Connection, kind: _Kind, row: Row, renamed: dict[str, str]) -> bool:
    """Insert a row unless its key is here; says whether it did."""
    same_key = and_(*(column == getattr(row, column.name) for column in kind.table.primary_key))
    try:
        found = first_row(connection, kind.model, select(kind.table).where(same_key))
        if found is not None:
            _check_same_point(found, row)
            return False
        if isinstance(row, StudyRow):
            row = _with_free_name(connection, row, renamed)
        connection.execute(insert(kind.table).values(row.columns()))
    except IntegrityError as error:
        raise BadInput(
            f"{kind.name} refers to a row that neither the file nor the store has",
            "export the history again",
        ) from error
    except (DataError, OverflowError) as error:
        raise BadInput(f"{kind.name} holds a value that the store cannot keep") from error
    return True


def _check_same_point(found: Row, row: Row) -> None:
    # Trials are known by their number, which two stores may have given to different points.
    if isinstance(found, PlannedTrial) and isinstance(row, PlannedTrial):
        # By their text: an argument that is no number (NaN) equals nothing, itself included.
        same_trial = fingerprint_of(found.trial.model_dump(mode="json")) == fingerprint_of(
            row.trial.model_dump(mode="json")
        )
        if not same_trial or found.key != row.key:
            raise BadInput(
                f"the store has another trial {row.number} in the same study",
                "import into another store: the study went on in both",
            )


def _with_free_name(connection: Connection, row: StudyRow, renamed: dict[str, str]) -> StudyRow:
    check_name(row.name)
    taken = select(studies.c.id).where(studies.c.name == row.name)
    if connection.scalar(taken) is None:
        return row
    renamed[row.name] = f"{row.name}-{row.id[:6]}"
    return row.model_copy(update={"name": renamed[row.name]})
