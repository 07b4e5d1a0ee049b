"""The tables of the history.

Optuna keeps its study in the same database, so every table of kvtune is named `kvtune_*`.
Changing a table here needs a new file in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import JsonValue, TypeAdapter
from sqlalchemy import (
    Column,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.types import TypeDecorator

from kvtune.types import (
    Ceilings,
    Decision,
    Device,
    EngineInfo,
    Forecast,
    Goal,
    LoadRun,
    Measurement,
    Profile,
    QualityReport,
    ServingConfig,
    Trial,
    WorkloadFingerprint,
)

TABLE_PREFIX = "kvtune_"

_ID = String(32)
_TIME = String(32)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's reader and writer of a type."""
    return TypeAdapter(kind)


def to_json(kind: Any, value: Any) -> str:
    """Write a value of type `kind` as JSON that `adapter(kind)` reads back to an equal value.

    Not pydantic's own writer, which turns NaN and infinity to null, and refuses the half of a
    surrogate pair that a server's broken output may hold; that one is written as "?".
    """
    plain = adapter(kind).dump_python(value, warnings=False)
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    # A load run may hold any mapping and any sequence.
    return dict(value) if isinstance(value, Mapping) else list(value)


class Document(TypeDecorator[Any]):
    """A value of the vocabulary as JSON text.

    Text and not the databases' JSON types: PostgreSQL's refuses the NUL characters and the NaN
    that logs and figures may hold.
    """

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Value to text."""
        return None if value is None else to_json(self.kind, value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Text to value."""
        return None if value is None else adapter(self.kind).validate_json(value)


class CompressedRun(TypeDecorator[Any]):
    """A load run with its raw records: written as what `compress` made of it, read as a run."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        """Bytes to run."""
        return None if value is None else adapter(LoadRun).validate_json(zlib.decompress(value))


def compress(run: LoadRun) -> bytes:
    """Pack a run. Takes a second for a million tokens, so not while others wait to write."""
    return zlib.compress(to_json(LoadRun, run).encode())


class CompressedText(TypeDecorator[str]):
    """A long text."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """Text to bytes."""
        return None if value is None else zlib.compress(value.encode("utf-8", "replace"))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """Bytes to text."""
        return None if value is None else zlib.decompress(value).decode()


_MAPPING = dict[str, JsonValue]

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

studies = Table(
    "kvtune_studies",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", _TIME, nullable=False),
    Column("kvtune_version", String(64), nullable=False),
    Column("model", Text, nullable=False),
    Column("workload_name", Text, nullable=False),
    Column("goal", Document(Goal), nullable=False),
    Column("engine", Document(EngineInfo), nullable=False),
    Column("device", Document(Device), nullable=False),
    Column("fingerprint", Document(WorkloadFingerprint), nullable=False),
    Column("base_arguments", Document(_MAPPING), nullable=False),
    Column("settings", Document(_MAPPING), nullable=False),
)

trials = Table(
    "kvtune_trials",
    metadata,
    Column("study_id", ForeignKey("kvtune_studies.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("created_at", _TIME, nullable=False),
    Column("key", Text, nullable=False),
    Column("trial", Document(Trial), nullable=False),
    Column("optuna_number", Integer),
    Column("rung", Integer),
)

measurements = Table(
    "kvtune_measurements",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("key", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("created_at", _TIME, nullable=False),
    Column("metrics", Document(dict[str, tuple[float, ...]]), nullable=False),
    Column("details", Document(Measurement), nullable=False),
    Column("figures", Document(_MAPPING), nullable=False),
    Index(None, "key", "created_at"),
)

failures = Table(
    "kvtune_failures",
    metadata,
    Column("measurement_id", ForeignKey("kvtune_measurements.id"), primary_key=True),
    Column("failure", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("fix", Text, nullable=False),
    Column("log_excerpt", Text, nullable=False),
)

runs = Table(
    "kvtune_runs",
    metadata,
    Column("measurement_id", ForeignKey("kvtune_measurements.id"), primary_key=True),
    Column("repeat", Integer, primary_key=True, autoincrement=False),
    Column("requests", Integer, nullable=False),
    Column("failed_requests", Integer, nullable=False),
    Column("run", CompressedRun, nullable=False),
)

attempts = Table(
    "kvtune_attempts",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("study_id", _ID, nullable=False),
    Column("number", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", Text, nullable=False),
    Column("started_at", _TIME, nullable=False),
    Column("ended_at", _TIME),
    Column("measurement_id", ForeignKey("kvtune_measurements.id"), index=True),
    ForeignKeyConstraint(
        ["study_id", "number"], ["kvtune_trials.study_id", "kvtune_trials.number"]
    ),
    Index(None, "study_id", "number"),
)

decisions = Table(
    "kvtune_decisions",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("study_id", ForeignKey("kvtune_studies.id"), nullable=False, index=True),
    Column("created_at", _TIME, nullable=False),
    Column("decision", Document(Decision), nullable=False),
)

steps = Table(
    "kvtune_steps",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("study_id", ForeignKey("kvtune_studies.id"), nullable=False, index=True),
    Column("created_at", _TIME, nullable=False),
    Column("step", String(16), nullable=False),
    Column("says", Text, nullable=False),
    Column("trial", Integer),
)

profiles = Table(
    "kvtune_profiles",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("profile", Document(Profile), nullable=False),
)

emitted = Table(
    "kvtune_emitted",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("study_id", ForeignKey("kvtune_studies.id"), index=True),
    Column("trial", Integer, nullable=False),
    Column("created_at", _TIME, nullable=False),
    Column("format", Text, nullable=False),
    Column("directory", Text, nullable=False),
    Column("files", Document(dict[str, str]), nullable=False),
    Column("config", Document(ServingConfig), nullable=False),
)

ceilings = Table(
    "kvtune_ceilings",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("device", Text, nullable=False),
    Column("ceilings", Document(Ceilings), nullable=False),
    Index(None, "device", "created_at"),
)

forecasts = Table(
    "kvtune_forecasts",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("subject", Text, nullable=False),
    Column("point", Text, nullable=False),
    Column("forecast", Document(Forecast), nullable=False),
    Index(None, "subject", "point"),
)

forecast_outcomes = Table(
    "kvtune_forecast_outcomes",
    metadata,
    Column("forecast_id", ForeignKey("kvtune_forecasts.id"), primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("study", Text, nullable=False),
    Column("trial", Integer, nullable=False),
    Column("measured", Float, nullable=False),
    Column("measured_baseline", Float, nullable=False),
)

quality_answers = Table(
    "kvtune_quality_answers",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("key", Text, nullable=False),
    Column("answers", CompressedText, nullable=False),
    Index(None, "key", "created_at"),
)

quality_reports = Table(
    "kvtune_quality_reports",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", _TIME, nullable=False),
    Column("study_id", ForeignKey("kvtune_studies.id"), index=True),
    Column("trial", Integer),
    Column("report", Document(QualityReport), nullable=False),
)
