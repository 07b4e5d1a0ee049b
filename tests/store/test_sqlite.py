import errno
import itertools
import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from contracts.store import StoreContract
from contracts.store_fixtures import lines
from contracts.store_values import a_full_history, a_run, a_study, a_trial, measure, ok
from sqlalchemy import event, text

from kvtune.errors import StoreError
from kvtune.store import Store, StudyRow, open_store

NOBODY = 65534


class TestSqlite(StoreContract):
    @pytest.fixture
    def url(self, tmp_path):
        return f"sqlite:///{tmp_path}/store.db"

    @pytest.fixture
    def other_url(self, tmp_path):
        return f"sqlite:///{tmp_path}/other.db"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store.db"


def limit_pages(store: Store, pages: int | None) -> None:
    """Let the file grow no further than it has, plus some pages; None takes the limit away."""

    def connected(connection, record):
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        limit = 2**30 if pages is None else used + pages
        connection.execute(f"PRAGMA max_page_count={limit}")

    store._engine.dispose()
    event.listen(store._engine, "connect", connected)


@contextmanager
def as_nobody():
    """Give up the rights of root, which no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_directory():
    """A directory that every user can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    directory.chmod(0o777)
    shutil.rmtree(directory)


def test_store_is_safe_and_does_not_block_readers(path):
    with open_store(path) as store, store.read() as connection:
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    normal = 1
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": normal,
        "foreign_keys": 1,
        "busy_timeout": 30_000,
    }


def test_missing_directories_are_created(tmp_path):
    with open_store(tmp_path / "a" / "b" / "c.db") as store:
        assert store.path == tmp_path / "a" / "b" / "c.db"
        assert store.path.exists()


def test_new_store_opens_in_less_than_half_a_second(tmp_path):
    def cpu_s(number: int) -> float:
        before = time.process_time()
        open_store(tmp_path / f"{number}.db").close()
        return time.process_time() - before

    assert min(cpu_s(number) for number in range(3)) < 0.5


def test_reader_sees_one_moment(path):
    with open_store(path) as store:
        study = a_study(store)
        with store.read() as connection:
            count = text("SELECT count(*) FROM kvtune_trials")
            assert connection.execute(count).scalar() == 0
            measure(store, study, a_trial(), ok())
            assert connection.execute(count).scalar() == 0


def test_writer_waits_for_another_program(path):
    with open_store(path, wait_s=10) as store:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
        release.start()
        began = time.monotonic()
        a_study(store)
        assert time.monotonic() - began >= 0.2
        release.join()
        other.close()


def test_new_store_waits_for_a_program_that_is_writing_to_the_file(path):
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE theirs (x)")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="is locked"):
        open_store(path, wait_s=0.1)
    release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    release.start()
    open_store(path, wait_s=10).close()
    release.join()
    other.close()


def test_locked_store_is_named_after_the_wait(path):
    with open_store(path, wait_s=0.2) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"store\.db is locked") as caught:
            a_study(store)
        assert "run the same command again" in caught.value.fix
        other.close()
        a_study(store)


def test_full_disk_loses_nothing_and_the_same_command_works_later(path):
    with open_store(path) as store:
        a_full_history(store)
        attempt = store.begin_attempt("chat", a_trial(9, 9), "k")
        before = lines(store)
        limit_pages(store, 2)
        large = a_run(requests=20_000)
        with pytest.raises(StoreError, match=r"disk full writing .*store\.db") as caught:
            store.finish_attempt(attempt, ok(), [large])
        assert "what was recorded before is safe" in caught.value.message
        assert "free space and run the same command again" in caught.value.fix
        assert lines(store) == before
        limit_pages(store, None)
        store.finish_attempt(attempt, ok(), [large])
        assert store.records("chat", 9) == [large.records]


def fill(store: Store, study: StudyRow) -> int:
    """Measure trials until the disk is full; returns how many were saved."""
    for number in itertools.count():
        try:
            measure(store, study, a_trial(number, number), ok())
        except StoreError as error:
            assert "disk full writing" in error.message  # noqa: PT017
            return number
    raise AssertionError("unreachable")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not allow a mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_measuring_until_a_real_disk_is_full_keeps_every_saved_trial(small_disk):
    with open_store(small_disk / "store.db") as store:
        measured = fill(store, a_study(store))
        assert measured > 3
        assert sum(row.measured for row in store.trials("chat")) == measured
    with open_store(small_disk / "store.db") as store:
        assert sum(row.measured for row in store.trials("chat")) == measured


def test_store_on_a_real_disk_that_others_have_filled_is_named(small_disk):
    with open_store(small_disk / "store.db") as store:
        a_full_history(store)
        before = lines(store)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"\0" * (1 << 20))
    for name in ("new.db", "store.db"):
        with pytest.raises(StoreError, match="disk full writing"):
            open_store(small_disk / name)
    (small_disk / "filler").unlink()
    with open_store(small_disk / "store.db") as store:
        assert lines(store) == before


def test_full_disk_under_an_export_is_named(path):
    class FullDisk:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    class ClosedPipe:
        def write(self, text):
            raise BrokenPipeError

    with open_store(path) as store:
        with pytest.raises(StoreError, match="disk full writing the export"):
            store.export(FullDisk())
        with pytest.raises(BrokenPipeError):
            store.export(ClosedPipe())


def test_read_only_store_is_read_but_not_written(shared_directory):
    path = shared_directory / "store.db"
    with open_store(path) as store:
        a_study(store)
    path.chmod(0o444)
    with as_nobody(), open_store(path) as store:
        assert store.study("chat") is not None
        with pytest.raises(StoreError, match=r"store\.db is read-only") as caught:
            a_study(store, "second")
        assert "writable" in caught.value.fix


def test_directory_that_cannot_be_created_is_named(shared_directory):
    shared_directory.chmod(0o555)
    with as_nobody(), pytest.raises(StoreError, match="Permission denied") as caught:
        open_store(shared_directory / "deeper" / "store.db")
    assert "KVTUNE_STORE" in caught.value.fix


def test_directory_that_cannot_be_written_is_named(shared_directory):
    shared_directory.chmod(0o555)
    with as_nobody(), pytest.raises(StoreError, match=r"store\.db cannot be opened"):
        open_store(shared_directory / "store.db")


def test_path_through_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        open_store(tmp_path / "file" / "store.db")


def test_directory_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(StoreError, match="Is a directory"):
        open_store(tmp_path)


def test_file_that_is_not_a_database_is_refused_and_kept(path):
    path.write_text("name: my notes\n" * 100)
    with pytest.raises(StoreError, match="not a kvtune store: the file is not a database"):
        open_store(path)
    assert path.read_text() == "name: my notes\n" * 100


def test_damaged_store_is_named(path):
    with open_store(path) as store:
        a_full_history(store)
    content = bytearray(path.read_bytes())
    page = 4096
    content[page:] = b"\xff" * (len(content) - page)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.db is damaged") as caught, open_store(path) as s:
        s.trials("chat")
    assert "restore a copy" in caught.value.fix


def test_record_that_cannot_be_read_is_named(path):
    with open_store(path) as store:
        a_study(store)
        with store.write() as connection:
            connection.execute(text("UPDATE kvtune_studies SET goal = '{\"objective\": 5}'"))
        with pytest.raises(StoreError, match="a record that this kvtune cannot read: Goal"):
            store.study("chat")


def test_store_says_where_it_is_and_closes_twice(path):
    store = open_store(path)
    assert repr(store) == f"Store('{path}')"
    store.close()
    store.close()
