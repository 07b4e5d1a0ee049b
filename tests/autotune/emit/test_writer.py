import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from kvtune.autotune.emit import writer
from kvtune.autotune.emit.writer import MANIFEST, write_files
from kvtune.errors import BadInput

FILES = {"serve.sh": "#!/bin/sh\nexec true\n", "vllm.yaml": "model: m # é\r\n"}


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_writes_the_texts_byte_for_byte_into_a_new_directory(tmp_path):
    digests = write_files(FILES, tmp_path / "a" / "b")
    for name, text in FILES.items():
        data = (tmp_path / "a" / "b" / name).read_bytes()
        assert data == text.encode()
        assert digests[name] == hashlib.sha256(data).hexdigest()


def test_scripts_are_executable_and_the_rest_is_not(tmp_path):
    write_files(FILES, tmp_path)
    assert (tmp_path / "serve.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "vllm.yaml").stat().st_mode & 0o777 == 0o644


def test_manifest_lists_what_was_written(tmp_path):
    digests = write_files(FILES, tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text()) == {"schema_version": 1, "files": digests}


def test_own_files_are_replaced(tmp_path):
    write_files(FILES, tmp_path)
    write_files({"vllm.yaml": "model: other\n"}, tmp_path)
    assert (tmp_path / "vllm.yaml").read_text() == "model: other\n"


def test_files_of_an_earlier_call_stay_known(tmp_path):
    write_files({"serve.sh": "#!/bin/sh\n"}, tmp_path)
    write_files({"vllm.yaml": "a: 1\n"}, tmp_path)
    write_files({"serve.sh": "#!/bin/sh\ntrue\n", "vllm.yaml": "a: 2\n"}, tmp_path)
    assert (tmp_path / "vllm.yaml").read_text() == "a: 2\n"


def test_file_of_somebody_else_is_never_overwritten_and_nothing_else_is_written(tmp_path):
    (tmp_path / "vllm.yaml").write_text("mine\n")
    before = snapshot(tmp_path)
    with pytest.raises(BadInput, match="was not written by kvtune") as caught:
        write_files(FILES, tmp_path)
    assert "force" in caught.value.fix
    assert snapshot(tmp_path) == before


def test_edited_file_is_not_overwritten(tmp_path):
    write_files(FILES, tmp_path)
    (tmp_path / "vllm.yaml").write_text("edited\n")
    before = snapshot(tmp_path)
    with pytest.raises(BadInput, match="was edited"):
        write_files({"vllm.yaml": "model: new\n"}, tmp_path)
    assert snapshot(tmp_path) == before


def test_force_overwrites_both(tmp_path):
    (tmp_path / "vllm.yaml").write_text("mine\n")
    write_files(FILES, tmp_path, force=True)
    (tmp_path / "serve.sh").write_text("edited\n")
    write_files(FILES, tmp_path, force=True)
    assert (tmp_path / "serve.sh").read_text() == FILES["serve.sh"]


def test_same_content_is_no_conflict_even_when_the_manifest_is_lost(tmp_path):
    write_files(FILES, tmp_path)
    (tmp_path / MANIFEST).unlink()
    write_files(FILES, tmp_path)


def test_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine\n")
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "vllm.yaml").symlink_to(target)
    with pytest.raises(BadInput, match="was not written by kvtune"):
        write_files(FILES, directory)
    write_files(FILES, directory, force=True)
    assert target.read_text() == "mine\n"


def test_broken_manifest_is_refused_unless_forced(tmp_path):
    for text in ("{", "[]", '{"files": 3}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(BadInput, match="not a manifest"):
            write_files(FILES, tmp_path)
    write_files(FILES, tmp_path, force=True)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/x", "", ".", "..", MANIFEST])
def test_name_that_leaves_the_directory_is_refused(name, tmp_path):
    with pytest.raises(BadInput, match="not a name"):
        write_files({name: "x"}, tmp_path, force=True)


def test_directory_that_is_a_file_is_said_clearly(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(BadInput, match="cannot write to"):
        write_files(FILES, tmp_path / "out")
    with pytest.raises(BadInput, match="cannot write to"):
        write_files(FILES, tmp_path / "out" / "deeper")


def test_directory_in_the_place_of_a_file_is_said_clearly(tmp_path):
    (tmp_path / "vllm.yaml").mkdir()
    with pytest.raises(BadInput, match="was not written by kvtune"):
        write_files(FILES, tmp_path)
    with pytest.raises(BadInput, match="cannot write to"):
        write_files(FILES, tmp_path, force=True)


@pytest.mark.parametrize(
    ("code", "fix"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "writable"), (errno.EACCES, "may write")],
)
def test_refusal_of_the_disk_leaves_the_old_file_whole_and_no_litter(
    code, fix, tmp_path, monkeypatch
):
    write_files(FILES, tmp_path)
    before = snapshot(tmp_path)

    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writer.os, "fsync", refuse)
    with pytest.raises(BadInput, match=os.strerror(code)) as caught:
        write_files({"vllm.yaml": "new\n"}, tmp_path)
    assert fix in caught.value.fix
    assert snapshot(tmp_path) == before
