"""A database that is open, of the current schema, and whose errors are StoreErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, create_engine, event, text

from kvtune.errors import StoreError
from kvtune.store.faults import disk_full, faults_explained, is_disk_full
from kvtune.store.location import Location
from kvtune.store.migrations import HEAD, current_revision, upgrade

# Any number does, as long as every kvtune takes the same one.
_MIGRATION_LOCK = 0x6B7674


class Database:
    """An open database; a context manager that closes it.

    SQLite runs in WAL mode: readers never wait, and what was committed outlives a killed process.
    A writer waits up to `wait_s` for another one.

    Raises:
        StoreError: from every method, when the database cannot be used.
    """

    def __init__(self, location: Location, *, wait_s: float) -> None:
        self.location = location
        if location.path is not None:
            _make_directory(location.path)
            self._engine = _sqlite_engine(location, wait_s)
            self._reader = self._engine
        else:
            self._engine = _postgresql_engine(location, wait_s)
            # One snapshot for all the queries of a read; SQLite gives that to every transaction.
            self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL to give to Optuna's RDBStorage, password included.

        Optuna formats its URL as a template, so that a brace is written twice.
        """
        text = self.location.url.render_as_string(hide_password=False)
        return text.replace("{", "{{").replace("}", "}}")

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for a server."""
        return self.location.path

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads, all from one moment."""
        with faults_explained(self.location), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes: all of it is durable afterwards, or none of it."""
        writer = self._engine.execution_options(kvtune_writes=True)
        with faults_explained(self.location), writer.begin() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection; may be called twice."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.location)!r})"

    def _migrate(self) -> None:
        with self.read() as connection:
            revision = current_revision(connection)
        if revision == HEAD:
            return
        with self.write() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            upgrade(connection)


def _make_directory(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise StoreError(
            f"the history cannot be kept in {path}: {error.strerror}",
            "set KVTUNE_STORE to a file in a directory that you can write to",
        ) from error


def _sqlite_engine(location: Location, wait_s: float) -> Engine:
    engine = create_engine(location.url, connect_args={"timeout": wait_s})

    def connected(connection: sqlite3.Connection, record: object) -> None:
        # The driver would begin transactions late, and would end them before a change of schema.
        connection.isolation_level = None
        try:
            _use_wal(connection, wait_s)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
        except sqlite3.Error:
            # The pool forgets a connection that was never ready, without closing it.
            connection.close()
            raise

    def began(connection: Connection) -> None:
        # A transaction that begins as a reader and then writes fails at once, without waiting,
        # when another one has written in between.
        writes = connection.get_execution_options().get("kvtune_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", began)
    return engine


def _use_wal(connection: sqlite3.Connection, wait_s: float) -> None:
    """Switch to WAL; here, and only here, SQLite does not wait by itself for another writer."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorname.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _postgresql_engine(location: Location, wait_s: float) -> Engine:
    patience = {} if "connect_timeout" in location.url.query else {"connect_timeout": 10}
    engine = create_engine(location.url, pool_pre_ping=True, connect_args=patience)

    def connected(connection: Any, record: object) -> None:
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(f"SET lock_timeout = {int(wait_s * 1000)}")
        connection.commit()

    event.listen(engine, "connect", connected)
    return engine
