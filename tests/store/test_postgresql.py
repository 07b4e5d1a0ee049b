import os
from uuid import uuid4

import pytest
from contracts.store import StoreContract
from contracts.store_values import a_study, a_trial, measure, ok
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from kvtune.errors import StoreError
from kvtune.store import open_store
from kvtune.store.location import locate

SERVER = os.environ.get("KVTUNE_TEST_POSTGRESQL_URL", "")

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.skipif(not SERVER, reason="KVTUNE_TEST_POSTGRESQL_URL names no server"),
]


@pytest.fixture
def make_database():
    """Create databases on the server; returns the URL of each as a user would write it."""
    engine = create_engine(locate(SERVER).url, isolation_level="AUTOCOMMIT")
    made = []

    def make(options: str = "") -> str:
        name = f"kvtune_test_{uuid4().hex}"
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} {options}"))
        made.append(name)
        url = make_url(SERVER).set(database=name)
        return url.render_as_string(hide_password=False)

    yield make
    with engine.connect() as connection:
        for name in made:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.fixture
def url(make_database) -> str:
    return make_database()


class TestPostgresql(StoreContract):
    @pytest.fixture
    def url(self, make_database):
        return make_database()

    @pytest.fixture
    def other_url(self, make_database):
        return make_database()


def test_store_has_no_file(url):
    with open_store(url) as store:
        assert store.path is None


def test_reader_sees_one_moment(url):
    with open_store(url) as store:
        study = a_study(store)
        with store.read() as connection:
            count = text("SELECT count(*) FROM kvtune_trials")
            assert connection.execute(count).scalar() == 0
            measure(store, study, a_trial(), ok())
            assert connection.execute(count).scalar() == 0


def test_locked_store_is_named_after_the_wait(url):
    with open_store(url, wait_s=0.2) as store, open_store(url) as other:
        with other.write() as connection:
            connection.execute(text("LOCK TABLE kvtune_studies"))
            with pytest.raises(StoreError, match="is locked"):
                a_study(store)
        a_study(store)


def test_missing_database_and_wrong_password_are_named(url):
    missing = make_url(url).set(database="no_such_database")
    with pytest.raises(StoreError, match="no_such_database") as caught:
        open_store(missing.render_as_string(hide_password=False))
    wrong = make_url(url).set(password="not-the-password")
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        open_store(wrong.render_as_string(hide_password=False))
    assert "not-the-password" not in caught.value.message
    assert "check the URL" in caught.value.fix


def test_user_who_may_not_create_tables_is_told_what_to_grant(url):
    with open_store(url) as store, store.write() as connection:
        role = f"kvtune_reader_{uuid4().hex}"
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'x'"))
        connection.execute(text("REVOKE ALL ON SCHEMA public FROM PUBLIC"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
    try:
        reader = make_url(url).set(username=role, password="x")
        with pytest.raises(StoreError, match="refused") as caught:
            open_store(reader.render_as_string(hide_password=False))
        assert "grant" in caught.value.fix
    finally:
        with open_store(url) as store, store.write() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
