"""Quality: what configurations answered, and what came of comparing answers."""

from __future__ import annotations

from uuid import uuid4

from sqlalchemy import insert, select

from kvtune.store.reading import all_rows, first_row
from kvtune.store.rows import QualityAnswersRow, QualityReportRow, StudyRow, now
from kvtune.store.schema import quality_answers, quality_reports
from kvtune.store.studies import StudyLog
from kvtune.types import QualityReport


class QualityLog(StudyLog):
    """The answers and quality reports of a store."""

    def save_quality_answers(self, key: str, answers: str) -> None:
        """Keep what a configuration answered, as JSON; later answers of a key replace it."""
        row = QualityAnswersRow(id=uuid4().hex, created_at=now(), key=key, answers=answers)
        with self.write() as connection:
            connection.execute(insert(quality_answers).values(row.columns()))

    def quality_answers(self, key: str) -> str | None:
        """The newest answers under a key; None when there are none."""
        newest = (
            select(quality_answers)
            .where(quality_answers.c.key == key)
            .order_by(quality_answers.c.created_at.desc(), quality_answers.c.id)
        )
        with self.read() as connection:
            row = first_row(connection, QualityAnswersRow, newest)
        return row.answers if row else None

    def save_quality_report(
        self,
        report: QualityReport,
        *,
        study: StudyRow | str | None = None,
        trial: int | None = None,
    ) -> str:
        """Keep a report, of a trial of a study if they are given; returns its id."""
        with self.write() as connection:
            row = QualityReportRow(
                id=uuid4().hex,
                created_at=now(),
                study_id=None if study is None else self._study_id(connection, study),
                trial=trial,
                report=report,
            )
            connection.execute(insert(quality_reports).values(row.columns()))
        return row.id

    def quality_reports(
        self, study: StudyRow | str | None = None, trial: int | None = None
    ) -> list[QualityReportRow]:
        """Every report, of one study or trial or of all, the newest first."""
        query = select(quality_reports).order_by(
            quality_reports.c.created_at.desc(), quality_reports.c.id
        )
        with self.read() as connection:
            if study is not None:
                of_study = self._study_id(connection, study)
                query = query.where(quality_reports.c.study_id == of_study)
            if trial is not None:
                query = query.where(quality_reports.c.trial == trial)
            return list(all_rows(connection, QualityReportRow, query))
