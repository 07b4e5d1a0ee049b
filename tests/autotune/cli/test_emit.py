"""`kvtune emit`: the recommended configuration as files."""

import hashlib

import pytest
import yaml

from kvtune.store.database import open_store

FORMATS = ("compose", "helm-production-stack", "kubernetes", "shell", "vllm-yaml")


def test_every_format_is_written_and_recorded(after_search, kvtune, tmp_path):
    said = kvtune("emit", "--study", after_search.study, "--format", "all", "-o", tmp_path / "out")
    said = [line.rpartition("/")[2] for line in said.out.splitlines()]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {*said, "kvtune-manifest.json"}
    assert len(said) == len(FORMATS)
    with open_store(after_search.home / "kvtune.db") as history:
        emitted = [row for row in history.emitted() if row.directory == str(tmp_path / "out")]
    assert {row.format for row in emitted} == set(FORMATS)
    for row in emitted:
        for name, digest in row.files.items():
            content = (tmp_path / "out" / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest


def test_the_file_sets_what_won_and_what_was_given(after_search, kvtune, tmp_path):
    kvtune("emit", "--study", after_search.study, "-o", tmp_path)
    settings = yaml.safe_load((tmp_path / "vllm.yaml").read_text())
    assert settings["block-size"] == 32
    assert settings["kv-cache-memory-bytes"] == 64 << 20
    assert settings["model"] == "org/tiny"


def test_a_trial_can_be_picked_and_is_marked_as_picked(after_search, kvtune, tmp_path):
    kvtune("emit", "--study", f"{after_search.study}/0", "-o", tmp_path)
    text = (tmp_path / "vllm.yaml").read_text()
    assert "block-size" not in yaml.safe_load(text)
    assert "not the one that the study recommends" in text


def test_json_names_files_and_warnings(after_search, kvtune, tmp_path):
    said = kvtune("emit", "--study", after_search.study, "-o", tmp_path, "--json").json()
    assert said["study"] == after_search.study
    assert said["trial"] == after_search.decision["recommended"]
    assert said["directory"] == str(tmp_path)
    assert list(said["files"]) == ["vllm.yaml"]
    assert all(isinstance(warning, str) for warning in said["warnings"])


def test_a_file_that_was_edited_is_kept_unless_forced(after_search, kvtune, tmp_path):
    words = ("emit", "--study", after_search.study, "-o", tmp_path)
    kvtune(*words)
    kvtune(*words)
    file = tmp_path / "vllm.yaml"
    file.write_text(file.read_text() + "seed: 7\n")
    assert "--force" in kvtune(*words, code=2).err
    assert "seed: 7" in file.read_text()
    kvtune(*words, "--force")
    assert "seed: 7" not in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "vllm-yml"], "there is no format 'vllm-yml'"),
        (["--study", "nope"], "there is no study named 'nope'"),
    ],
)
def test_what_does_not_exist_is_bad_input(words, message, after_search, kvtune, tmp_path):
    assert message in kvtune("emit", "-o", tmp_path, *words, code=2).err
    assert list(tmp_path.iterdir()) == []


def test_emitting_needs_no_vllm_for_a_simulated_study(after_search, kvtune, tmp_path):
    words = ("emit", "--study", after_search.study, "-o", tmp_path)
    kvtune(*words, "--engine-python", "/no/such/python")
