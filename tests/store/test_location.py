import sys
from pathlib import Path

import optuna
import pytest

from kvtune.errors import BadInput, MissingExtra, StoreError
from kvtune.store import open_store
from kvtune.store.location import locate


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("KVTUNE_STORE", "KVTUNE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_default_is_below_the_home_directory(tmp_path):
    assert locate().path == tmp_path / "home/.local/share/kvtune/kvtune.db"


def test_environment_moves_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path / "kv"))
    assert locate().path == tmp_path / "kv/kvtune.db"
    monkeypatch.setenv("KVTUNE_STORE", str(tmp_path / "this.db"))
    assert locate().path == tmp_path / "this.db"
    assert locate(tmp_path / "that.db").path == tmp_path / "that.db"


def test_environment_may_name_a_server(monkeypatch):
    monkeypatch.setenv("KVTUNE_STORE", "postgresql://me@host/base")
    assert locate().path is None


def test_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(StoreError, match="no home directory") as caught:
        locate()
    assert "KVTUNE_HOME" in caught.value.fix


def test_relative_path_does_not_depend_on_where_kvtune_goes_next(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for written in (
        "store.db",
        Path("store.db"),
        "sqlite:///store.db",
        "sqlite+pysqlite:///store.db",
    ):
        location = locate(written)
        assert location.path == tmp_path / "store.db"
        assert location.url.render_as_string() == f"sqlite:///{tmp_path}/store.db"


def test_tilde_is_the_home_directory(tmp_path):
    assert locate("~/store.db").path == tmp_path / "home/store.db"
    with pytest.raises(BadInput, match="home directory"):
        locate("~nobody-by-that-name/store.db")


def test_path_with_odd_characters_is_one_file_for_kvtune_and_optuna(tmp_path):
    path = tmp_path / "söme {odd} name, 100 @home: it's" / "store.db"
    with open_store(path) as store:
        storage = optuna.storages.RDBStorage(store.url)
        assert storage.get_all_studies() == []
        storage.engine.dispose()
        with store.read() as connection:
            names = connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
    assert {"trials", "kvtune_trials"} <= set(names)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.parent.name]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///a.db?mode=ro"])
def test_store_that_is_no_plain_file_is_refused(url):
    with pytest.raises(BadInput, match="not a plain SQLite file"):
        locate(url)


@pytest.mark.parametrize(
    "url", ["mysql://u@h/d", "sqlite+aiosqlite:///a.db", "postgresql+asyncpg://u@h/d"]
)
def test_other_kind_of_database_is_refused(url):
    with pytest.raises(BadInput):
        locate(url)


@pytest.mark.parametrize("url", ["://", "postgresql://h:port/d", "-://x"])
def test_url_that_cannot_be_read_is_refused(url):
    with pytest.raises(BadInput, match="URL of the store cannot be read"):
        locate(url)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_is_reached_by_the_driver_that_is_installed(scheme):
    pytest.importorskip("psycopg")
    url = locate(f"{scheme}://me:secret@host:5433/base?sslmode=require").url
    assert url.render_as_string(hide_password=False) == (
        "postgresql+psycopg://me:secret@host:5433/base?sslmode=require"
    )


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_missing_driver_is_told_by_the_command_that_installs_it(monkeypatch, scheme):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(MissingExtra, match="driver psycopg") as caught:
        open_store(f"{scheme}://me@host/base")
    assert caught.value.fix == "pip install 'kvtune[postgresql]'"


def test_password_is_never_shown():
    pytest.importorskip("psycopg")
    location = locate("postgresql://me:secret@127.0.0.1:1/base")
    assert "secret" not in str(location)
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        open_store("postgresql://me:secret@127.0.0.1:1/base")
    assert "secret" not in caught.value.message
    assert "127.0.0.1:1" in caught.value.message
