"""Ceilings: what devices reach, kept so that they are measured once."""

from __future__ import annotations

from uuid import uuid4

from sqlalchemy import insert, select

from kvtune.store.connection import Database
from kvtune.store.reading import first_row
from kvtune.store.rows import CeilingsRow, now
from kvtune.store.schema import ceilings
from kvtune.types import Ceilings


class CeilingLog(Database):
    """The ceilings of a store."""

    def save_ceilings(self, measured: Ceilings) -> None:
        """Keep what a device reached; a later measurement replaces it, and both are kept."""
        row = CeilingsRow(
            id=uuid4().hex, created_at=now(), device=measured.device, ceilings=measured
        )
        with self.write() as connection:
            connection.execute(insert(ceilings).values(row.columns()))

    def ceilings(self, device: str) -> Ceilings | None:
        """The newest ceilings of the device with this key; None when it was never measured."""
        newest = (
            select(ceilings)
            .where(ceilings.c.device == device)
            .order_by(ceilings.c.created_at.desc(), ceilings.c.id)
        )
        with self.read() as connection:
            row = first_row(connection, CeilingsRow, newest)
        return row.ceilings if row else None
