"""Where the history is: from what the user wrote to a database URL with a driver."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from kvtune.errors import BadInput, MissingExtra, StoreError

_POSTGRESQL_DRIVERS = ("psycopg", "psycopg2")


@dataclass(frozen=True, slots=True)
class Location:
    """A database. `path` is its file, None for a server. As text it shows no password."""

    url: URL
    path: Path | None

    def __str__(self) -> str:
        return str(self.path) if self.path else self.url.render_as_string(hide_password=True)


def locate(url_or_path: str | Path | None = None) -> Location:
    """Find the database that `url_or_path` names: a file, an SQLite or a PostgreSQL URL.

    None is the user's default: `$KVTUNE_STORE`, else `$KVTUNE_HOME/kvtune.db`, else
    `~/.local/share/kvtune/kvtune.db`.

    Raises:
        BadInput: not a URL, or of another kind of database.
        MissingExtra: a PostgreSQL URL without a driver for it.
        StoreError: there is no home directory to hold the default.
    """
    text = str(url_or_path) if url_or_path is not None else os.environ.get("KVTUNE_STORE", "")
    if not text:
        return _file(default_directory() / "kvtune.db")
    if "://" not in text:
        return _file(Path(text))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise BadInput(
            "the URL of the store cannot be read",
            "write a path, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE",
        ) from error
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        return _sqlite(url)
    if url.drivername.partition("+")[0] in ("postgresql", "postgres"):
        return Location(url=_with_driver(url), path=None)
    raise BadInput(
        f"a store cannot be kept in {url.drivername!r}",
        "use a path, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE",
    )


def default_directory() -> Path:
    """Where kvtune keeps a user's files: `$KVTUNE_HOME`, else `~/.local/share/kvtune`.

    Raises:
        StoreError: the user has no home directory.
    """
    home = os.environ.get("KVTUNE_HOME")
    if home:
        return Path(home)
    try:
        return Path.home() / ".local" / "share" / "kvtune"
    except RuntimeError as error:
        raise StoreError(
            "this user has no home directory to keep the history in",
            "set KVTUNE_HOME to a directory, or KVTUNE_STORE to a file",
        ) from error


def _sqlite(url: URL) -> Location:
    if url.query or not url.database or url.database == ":memory:":
        raise BadInput(
            f"{url.render_as_string()} is not a plain SQLite file",
            "give the path of a file; a store in memory would be lost",
        )
    return _file(Path(url.database))


def _file(path: Path) -> Location:
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise BadInput(f"the home directory in {path} does not exist", "write it out") from error
    url = URL.create("sqlite", database=str(path))
    # Optuna is given the URL as text, and SQLAlchemy 2.0 writes a "?" that it then cannot read.
    if make_url(url.render_as_string()).database != str(path):
        raise BadInput(
            f"{path} cannot be written as a database URL", "use a path without '?', '#' or '%'"
        )
    return Location(url=url, path=path)


def _with_driver(url: URL) -> URL:
    asked = url.drivername.partition("+")[2]
    if asked and asked not in _POSTGRESQL_DRIVERS:
        raise BadInput(
            f"the PostgreSQL driver {asked!r} is not supported",
            "write postgresql:// and kvtune picks one that is installed",
        )
    for driver in (asked,) if asked else _POSTGRESQL_DRIVERS:
        try:
            importlib.import_module(driver)
        except ImportError:
            continue
        return url.set(drivername=f"postgresql+{driver}")
    raise MissingExtra(
        f"a store in PostgreSQL needs the driver {asked or _POSTGRESQL_DRIVERS[0]}, "
        "which is not installed",
        "pip install 'kvtune[postgresql]'",
    )
