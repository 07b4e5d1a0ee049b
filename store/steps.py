"""Steps: what a search said on the way to its decision, with the time of each."""

from __future__ import annotations

from uuid import uuid4

from sqlalchemy import insert, select

from kvtune.store.reading import all_rows
from kvtune.store.rows import StepRow, StudyRow, now
from kvtune.store.schema import steps
from kvtune.store.studies import StudyLog


class StepLog(StudyLog):
    """The steps of the studies of a store."""

    def save_step(
        self, study: StudyRow | str, step: str, says: str, *, trial: int | None = None
    ) -> None:
        """Keep what a search said: of which kind it is, and about which trial, by its number."""
        with self.write() as connection:
            row = StepRow(
                id=uuid4().hex,
                study_id=self._study_id(connection, study),
                created_at=now(),
                step=step,
                says=says.replace("\0", "\ufffd"),  # PostgreSQL's text cannot hold it.
                trial=trial,
            )
            connection.execute(insert(steps).values(row.columns()))

    def steps(self, study: StudyRow | str) -> list[StepRow]:
        """Every step of a study in the order of time; none of a study of an older kvtune."""
        with self.read() as connection:
            in_order = (
                select(steps)
                .where(steps.c.study_id == self._study_id(connection, study))
                .order_by(steps.c.created_at, steps.c.id)
            )
            return list(all_rows(connection, StepRow, in_order))
