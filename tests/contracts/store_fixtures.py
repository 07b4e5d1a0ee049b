"""What every contract of a store needs: the store, and what it exports."""

import io
import json

import pytest

from kvtune.store import Store, open_store


def lines(store: Store, study: str | None = None) -> list[str]:
    stream = io.StringIO()
    count = store.export(stream, study)
    header, *rows = stream.getvalue().splitlines()
    assert json.loads(header)["kind"] == "kvtune-export"
    assert count == len(rows)
    return rows


def exported(store: Store, study: str | None = None) -> io.StringIO:
    stream = io.StringIO()
    store.export(stream, study)
    stream.seek(0)
    return stream


class StoreFixtures:
    """Subclass it with the fixtures `url`, a fresh database, and `other_url`, another one."""

    @pytest.fixture
    def url(self):
        raise NotImplementedError

    @pytest.fixture
    def other_url(self):
        raise NotImplementedError

    @pytest.fixture
    def store(self, url):
        with open_store(url) as store:
            yield store

    @pytest.fixture
    def other_store(self, other_url):
        with open_store(other_url) as store:
            yield store
