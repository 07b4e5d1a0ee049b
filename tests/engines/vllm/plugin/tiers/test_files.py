"""Pages as files: whole or not at all, and never another one's."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.tiers import files

NAME = "0123456789abcdef-" + "7c" * 32
OTHER = "0123456789abcdef-" + "7d" * 32
PAGE = bytes(range(256)) * 3


@pytest.fixture
def folder(tmp_path):
    files.write(tmp_path, NAME, memoryview(PAGE))
    return tmp_path


def read(folder, name=NAME, length=768):
    page = bytearray(length)
    files.read_into(folder, name, memoryview(page))
    return bytes(page)


def test_a_page_comes_back_as_it_was(folder):
    assert read(folder) == PAGE
    assert files.path_of(folder, NAME).stat().st_size == files.file_bytes(len(PAGE))


def test_what_was_never_written_cannot_be_read(folder):
    with pytest.raises(FileNotFoundError):
        read(folder, OTHER)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, files.file_bytes(len(PAGE)) - 1), st.integers(1, 255))
def test_whichever_byte_is_another_the_file_is_refused(tmp_path_factory, place, change):
    folder = tmp_path_factory.mktemp("damaged")
    files.write(folder, NAME, memoryview(PAGE))
    path = files.path_of(folder, NAME)
    content = bytearray(path.read_bytes())
    content[place] ^= change
    path.write_bytes(content)
    with pytest.raises(files.Damaged):
        read(folder)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, files.file_bytes(len(PAGE)) - 1))
def test_wherever_it_ends_too_early_the_file_is_refused(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("short")
    files.write(folder, NAME, memoryview(PAGE))
    os.truncate(files.path_of(folder, NAME), length)
    with pytest.raises(files.Damaged):
        read(folder)


def test_a_file_with_more_than_a_page_is_refused(folder):
    with files.path_of(folder, NAME).open("ab") as file:
        file.write(b"x")
    with pytest.raises(files.Damaged):
        read(folder)


def test_a_page_of_another_size_is_refused(folder):
    with pytest.raises(files.Damaged, match="255 bytes of a page"):
        read(folder, length=255)


def test_a_file_under_another_name_is_refused(folder):
    path = files.path_of(folder, OTHER)
    path.parent.mkdir()
    files.path_of(folder, NAME).rename(path)
    with pytest.raises(files.Damaged, match="checksum"):
        read(folder, OTHER)


def test_a_file_that_may_not_be_written_leaves_nothing(folder, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write(folder, OTHER, memoryview(PAGE))
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [f"{NAME}.kv"]


def test_a_disk_that_takes_a_part_at_a_time_gets_all(folder, monkeypatch):
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:100]))
    files.write(folder, OTHER, memoryview(PAGE))
    assert read(folder, OTHER) == PAGE


def test_pages_are_listed_by_their_last_use(folder):
    files.write(folder, OTHER, memoryview(PAGE[:10]))
    for name, used_s in ((NAME, 100), (OTHER, 50)):
        os.utime(files.path_of(folder, name), (used_s, used_s))
    assert files.kept(folder) == [(OTHER, files.file_bytes(10)), (NAME, files.file_bytes(768))]
    read(folder, OTHER, 10)
    assert [name for name, _ in files.kept(folder)] == [NAME, OTHER]


def test_what_a_killed_server_left_unfinished_is_removed(folder):
    unfinished = files.path_of(folder, OTHER).with_suffix(".new")
    unfinished.parent.mkdir()
    unfinished.write_bytes(PAGE)
    assert [name for name, _ in files.kept(folder)] == [NAME]
    assert not unfinished.exists()


def test_what_goes_while_it_is_listed_is_not_kept(folder):
    gone = files.path_of(folder, OTHER)
    gone.parent.mkdir()
    gone.symlink_to("nothing")  # listed, and not there when it is looked at
    assert [name for name, _ in files.kept(folder)] == [NAME]


def test_files_of_others_are_neither_listed_nor_removed(folder):
    others = [folder / "ab" / "x.kv", folder / "7c" / f"{OTHER}.kv", folder / "ab" / "y.new"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"precious")
    assert [name for name, _ in files.kept(folder)] == [NAME]
    assert all(path.exists() for path in others)


def test_a_removed_page_is_gone_and_may_be_removed_again(folder):
    files.remove(folder, NAME)
    files.remove(folder, NAME)
    assert files.kept(folder) == []


def test_a_folder_is_one_servers_until_it_lets_go(tmp_path):
    held = files.lock(tmp_path)
    assert held is not None
    assert files.lock(tmp_path) is None
    os.close(held)
    again = files.lock(tmp_path)
    assert again is not None
    os.close(again)
