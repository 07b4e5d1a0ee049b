"""Open a store, and what a whole store can do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from sqlalchemy import select

from kvtune.errors import NotFound
from kvtune.store.attempts import AttemptLog
from kvtune.store.ceilings import CeilingLog
from kvtune.store.forecasts import ForecastLog
from kvtune.store.handover import HandoverLog
from kvtune.store.location import locate
from kvtune.store.quality import QualityLog
from kvtune.store.reading import all_rows
from kvtune.store.rows import ImportReport, Reference, StudyRow
from kvtune.store.schema import studies
from kvtune.store.steps import StepLog
from kvtune.store.transfer import export_history, import_history

LATEST = "latest"


class Store(AttemptLog, HandoverLog, CeilingLog, ForecastLog, QualityLog, StepLog):
    """The history: what was measured before, in one SQLite file or a PostgreSQL database.

    A context manager that closes it. Every method raises StoreError when the database cannot be
    used; a study is given by its row or its name, and NotFound is raised when there is none.
    """

    def resolve(self, reference: str) -> Reference:
        """Find what a user names: a study, the unique start of its name, "latest" for the newest
        study, or any of these with "/NUMBER" for one of its trials.

        Raises:
            NotFound: nothing has that name, or several studies begin so; the fix names the nearest.
        """
        name, slash, number = reference.partition("/")
        study = self._named(name)
        if not slash:
            return Reference(study)
        if not number.isdecimal():
            raise NotFound(
                f"{reference!r} names no trial: {number!r} is not a number",
                f"write the number of a trial, such as {study.name}/0",
            )
        return Reference(study, self.trial(study, int(number)))

    def export(self, stream: TextIO, study: StudyRow | str | None = None) -> int:
        """Write the history, or that of one study, as JSON lines; returns the number of rows."""
        study_id = None
        if study is not None:
            with self.read() as connection:
                study_id = self._study_id(connection, study)
        return export_history(self, stream, study_id)

    def import_(self, stream: Iterable[str]) -> ImportReport:
        """Add what an export holds and this store does not, all or nothing.

        Raises:
            BadInput: a line that is not of an export, or of a newer kvtune; the message names it.
        """
        return import_history(self, stream)

    def _named(self, name: str) -> StudyRow:
        with self.read() as connection:
            newest_first = select(studies).order_by(studies.c.created_at.desc(), studies.c.id)
            rows = list(all_rows(connection, StudyRow, newest_first))
        if not rows:
            raise NotFound(f"there are no studies in {self.location} yet", "search first")
        if name == LATEST:
            return rows[0]
        begin_so = [row for row in rows if name and row.name.startswith(name)]
        exactly = [row for row in begin_so if row.name == name]
        if len(exactly or begin_so) == 1:
            return (exactly or begin_so)[0]
        names = [row.name for row in begin_so or rows]
        near = names if begin_so else difflib.get_close_matches(name, names) or names
        says = "several studies begin with" if begin_so else "there is no study named"
        raise NotFound(f"{says} {name!r}", f"did you mean {', '.join(near[:5])}?")


def open_store(url_or_path: str | Path | None = None, *, wait_s: float = 30.0) -> Store:
    """Open the history, and create it when it does not exist.

    `url_or_path` is an SQLite file or an SQLAlchemy URL of SQLite or PostgreSQL; None is
    `$KVTUNE_STORE`, else `$KVTUNE_HOME/kvtune.db`, else `~/.local/share/kvtune/kvtune.db`. A writer
    waits up to `wait_s` seconds for another one.

    Raises:
        BadInput: not a store that kvtune can keep.
        MissingExtra: a PostgreSQL URL without a driver for it.
        StoreError: it cannot be opened, or was written by a newer kvtune.
    """
    return Store(locate(url_or_path), wait_s=wait_s)
