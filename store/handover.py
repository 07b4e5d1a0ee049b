"""What a search hands over: decisions, profiles and emitted serving configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from sqlalchemy import insert, select

from kvtune.errors import NotFound
from kvtune.store.reading import all_rows, first_row
from kvtune.store.rows import DecisionRow, EmittedRow, ProfileRow, StudyRow, now
from kvtune.store.schema import decisions, emitted, profiles, studies
from kvtune.store.studies import StudyLog
from kvtune.types import Decision, Profile, ServingConfig


class HandoverLog(StudyLog):
    """The decisions, profiles and emitted configs of a store."""

    def save_decision(self, study: StudyRow | str, decision: Decision) -> None:
        """Record how a study ended; a later decision replaces it and the earlier one is kept."""
        with self.write() as connection:
            row = DecisionRow(
                id=uuid4().hex,
                study_id=self._study_id(connection, study),
                created_at=now(),
                decision=decision,
            )
            connection.execute(insert(decisions).values(row.columns()))

    def decision(self, study: StudyRow | str) -> Decision | None:
        """The newest decision of a study."""
        row = self.decision_row(study)
        return row.decision if row else None

    def decision_row(self, study: StudyRow | str) -> DecisionRow | None:
        """The newest decision of a study with the time at which it was made."""
        with self.read() as connection:
            newest = (
                select(decisions)
                .where(decisions.c.study_id == self._study_id(connection, study))
                .order_by(decisions.c.created_at.desc(), decisions.c.id)
            )
            return first_row(connection, DecisionRow, newest)

    def save_profile(self, profile: Profile) -> str:
        """Keep a profile; returns its id."""
        row = ProfileRow(id=uuid4().hex, created_at=now(), profile=profile)
        with self.write() as connection:
            connection.execute(insert(profiles).values(row.columns()))
        return row.id

    def profiles(self) -> list[ProfileRow]:
        """Every profile, the newest first."""
        newest_first = select(profiles).order_by(profiles.c.created_at.desc(), profiles.c.id)
        with self.read() as connection:
            return list(all_rows(connection, ProfileRow, newest_first))

    def profile(self, id_: str) -> ProfileRow:
        """The profile with this id, or with the only id that begins so.

        Raises:
            NotFound: there is none, or more than one.
        """
        with self.read() as connection:
            begins_so = select(profiles).where(profiles.c.id.startswith(id_, autoescape=True))
            found = list(all_rows(connection, ProfileRow, begins_so.limit(2)))
        if len(found) != 1:
            raise NotFound(
                f"{'several profiles have' if found else 'there is no profile with'} "
                f"an id that begins with {id_!r}",
                "list the profiles, and write more of the id",
            )
        return found[0]

    def save_emitted(
        self,
        config: ServingConfig,
        format: str,
        directory: str | Path,
        files: Mapping[str, str],
    ) -> str:
        """Record a serving config that was written to `directory`; returns its id.

        `files` maps each file name to the SHA-256 of its content.
        """
        with self.write() as connection:
            row = EmittedRow(
                id=uuid4().hex,
                study_id=connection.scalar(
                    select(studies.c.id).where(studies.c.name == config.study)
                ),
                trial=config.trial,
                created_at=now(),
                format=format,
                directory=str(directory),
                files=dict(files),
                config=config,
            )
            connection.execute(insert(emitted).values(row.columns()))
        return row.id

    def emitted(self, study: StudyRow | str | None = None) -> list[EmittedRow]:
        """Every serving config that was written out, of one study or of all, the newest first."""
        query = select(emitted).order_by(emitted.c.created_at.desc(), emitted.c.id)
        with self.read() as connection:
            if study is not None:
                query = query.where(emitted.c.study_id == self._study_id(connection, study))
            return list(all_rows(connection, EmittedRow, query))
