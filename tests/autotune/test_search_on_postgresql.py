"""A team's store: a search that keeps its history and its sampler in PostgreSQL, by URL alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = os.environ.get("KVTUNE_TEST_POSTGRESQL_URL", "")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.postgresql,
    pytest.mark.skipif(not SERVER, reason="KVTUNE_TEST_POSTGRESQL_URL names no server"),
]


def kvtune(*words):
    command = [str(Path(sys.executable).with_name("kvtune")), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.stdout


def test_a_search_runs_is_shown_and_goes_on_in_postgresql(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path))
    workload = tmp_path / "w.jsonl"
    lengths = ("--input-tokens", 24, "--output-tokens", 8)
    shared = ("--shared-prefixes", 2, "--prefix-tokens", 608)
    kvtune("workload", "make", "--requests", 24, *shared, *lengths, "-o", workload)
    study = f"pg-{tmp_path.name}"
    words = (
        *("search", "--engine", "simulated", "--model", "org/tiny", "--workload", workload),
        *("--concurrency", 12, "--kv-memory", "64MiB", "--goal", "p95 ttft <= 10s"),
        *("--engine-args", "--max-model-len 2048 --simulate-time-scale 0.05", "--study", study),
        *("--finalists", 1, "--confirm-rounds", 2, "--store", SERVER, "--json"),
    )
    first = json.loads(kvtune(*words, "--budget", 2))
    assert first["recommended"] is not None
    shown = json.loads(kvtune("show", study, "--store", SERVER, "--json"))
    searched = [row for row in shown["trials"] if row["trial"]["parent"] is None]
    assert len(searched) == 2
    kvtune(*words, "--budget", 3)
    shown = json.loads(kvtune("show", study, "--store", SERVER, "--json"))
    searched = [row for row in shown["trials"] if row["trial"]["parent"] is None]
    assert len(searched) == 3, "a larger budget goes on with the same study"
    assert not list(tmp_path.glob("*.db")), "nothing went to a file"
