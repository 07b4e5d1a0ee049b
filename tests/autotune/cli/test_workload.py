"""`kvtune workload`: look at a file, or make one."""

import pytest
from contracts.pages import Parsed

from kvtune.types import WorkloadFingerprint

LENGTHS = ("--input-tokens", "uniform:32-64", "--output-tokens", "lognormal:32,0.5")


def test_the_same_seed_makes_the_same_file(kvtune, tmp_path):
    made = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        kvtune("workload", "make", "-o", tmp_path / name, *LENGTHS, "--seed", seed)
        made[name] = (tmp_path / name).read_bytes()
    assert made["a"] == made["b"]
    assert made["a"] != made["c"]


def test_what_is_made_is_what_is_found(kvtune, tmp_path):
    file = tmp_path / "deep" / "w.jsonl"
    shared = ("--shared-prefixes", 2, "--prefix-tokens", 64, "--arrival", "constant:4")
    said = kvtune("workload", "make", "--requests", 40, *LENGTHS, *shared, "-o", file)
    assert f"wrote 40 requests to {file}" in said.err
    found = WorkloadFingerprint.model_validate_json(
        kvtune("workload", "inspect", file, "--json").out
    )
    assert found.requests == 40
    assert found.request_rate_per_s == pytest.approx(4, rel=0.05)
    assert found.burstiness == pytest.approx(0, abs=0.01)
    assert 96 <= found.input_tokens.p50 <= 128
    assert found.reusable_prefix_share[64] > 0.4
    assert found.reusable_prefix_share[128] == 0


def test_a_fingerprint_is_drawn(kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    kvtune("workload", "make", "--requests", 40, *LENGTHS, "-o", file)
    said = kvtune("workload", "inspect", file).out
    assert said.startswith("40 requests\n")
    assert "prompt tokens: mean " in said
    assert "█" in said
    assert "not in the file" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_arrivals_and_reuse_are_drawn(kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    shared = ("--shared-prefixes", 2, "--prefix-tokens", 64, "--arrival", "constant:4")
    kvtune("workload", "make", "--requests", 40, *LENGTHS, *shared, "-o", file)
    said = kvtune("workload", "inspect", file).out.splitlines()
    (at,) = [i for i, line in enumerate(said) if line.startswith("arrivals in the file")]
    assert said[at].endswith("at most 4 a second")
    assert set(said[at + 1].strip()) == {"█"}, "they come evenly"
    assert any(line.split()[:1] == ["64"] and "█" in line for line in said)
    assert not any("not known" in line for line in said)


def test_a_workload_is_written_as_a_page(kvtune, tmp_path):
    file, page = tmp_path / "w.jsonl", tmp_path / "w.html"
    kvtune("workload", "make", "--requests", 40, *LENGTHS, "-o", file)
    said = kvtune("workload", "inspect", file, "--html", page)
    assert "wrote " in said.err
    found = Parsed(page.read_text())
    assert found.texts["h1"] == ["Workload w"]
    assert any(text.startswith("arrivals: ") for text in found.texts["li"])


def test_only_the_first_requests_are_looked_at_when_asked(kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    kvtune("workload", "make", "--requests", 40, "-o", file)
    assert kvtune("workload", "inspect", file, "--limit", 7, "--json").json()["requests"] == 7


def test_a_file_is_not_overwritten_unless_forced(kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    file.write_text("mine")
    assert "exists already" in kvtune("workload", "make", "-o", file, code=2).err
    assert file.read_text() == "mine"
    kvtune("workload", "make", "-o", file, "--force")
    assert file.read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input-tokens", "long"], "input_tokens cannot be 'long'"),
        (["--arrival", "often"], "arrival"),
        (["--prefix-tokens", "17", "--shared-prefixes", "2"], "16"),
        (["--requests", "0"], "requests"),
    ],
)
def test_a_shape_that_is_none_is_bad_input_and_leaves_no_file(words, message, kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    assert message in kvtune("workload", "make", "-o", file, *words, code=2).err
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_bad_input(kvtune, tmp_path):
    (tmp_path / "file").write_text("")
    said = kvtune("workload", "make", "-o", tmp_path / "file" / "w.jsonl", code=2)
    assert "cannot be written" in said.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": 1}\n', "line 2"),
        ("what is this\n", "is in no known trace format"),
        ("", "the file is empty"),
    ],
)
def test_a_file_that_is_no_workload_is_bad_input(text, message, kvtune, tmp_path):
    file = tmp_path / "w.jsonl"
    file.write_text(text)
    assert message in kvtune("workload", "inspect", file, code=2).err


def test_a_file_that_is_not_there_is_bad_input(kvtune, tmp_path):
    assert "there is no file" in kvtune("workload", "inspect", tmp_path / "nope", code=2).err
