"""The versions of the schema, applied when a store is opened.

A change of the schema is one more file in `versions`, and `HEAD` names the newest. Files that were
released are never edited. Optuna has an Alembic of its own in the same database, with its own
version table and its own tables; neither ever touches the other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, column, inspect, select, table

from kvtune.errors import StoreError
from kvtune.store.schema import TABLE_PREFIX, metadata

HEAD = "0005"
VERSION_TABLE = "kvtune_alembic_version"


def current_revision(connection: Connection) -> str | None:
    """The schema version of a database; None when kvtune has no tables in it."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.scalar(
        select(column("version_num")).select_from(table(VERSION_TABLE))
    )
    return revision


def upgrade(connection: Connection, revision: str = HEAD) -> None:
    """Bring the schema to `revision` within the transaction of `connection`.

    Raises:
        StoreError: the database was written by a newer kvtune.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    # Alembic reads the option through configparser, to which "%" means something.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    found = current_revision(connection)
    if found is not None and found not in known:
        raise StoreError(
            f"the store was written by a newer kvtune: its schema is {found}, "
            f"this version knows up to {HEAD}",
            "upgrade with `pip install -U kvtune`, or set KVTUNE_STORE to another file",
        )
    command.upgrade(config, revision)


def migration_options() -> dict[str, Any]:
    """What Alembic must be told so that it sees kvtune's tables only."""
    return {
        "target_metadata": metadata,
        "version_table": VERSION_TABLE,
        "include_name": _is_ours,
    }


def _is_ours(name: str | None, type_: str, parents: Any) -> bool:
    return type_ != "table" or (name or "").startswith(TABLE_PREFIX)
