"""On a real vLLM, a KV format that returns garbage is rejected, by `quality` and by `search`."""

import json
import os
import signal
import subprocess
import sys

import pytest
from contracts.processor import needs_avx512

from kvtune.autotune.cli.app import main
from kvtune.autotune.cli.quality import FAILED
from kvtune.policies.base import Support
from kvtune.policies.kv_dtype import KvDtype
from kvtune.profilers.quality.suites.fidelity import Fidelity
from kvtune.store.database import open_store

pytestmark = [pytest.mark.integration, needs_avx512]

SERVER = "--max-model-len 4096 --kv-cache-memory-bytes 419430400 --max-num-seqs 16"


def test_the_screen_rejects_a_format_that_answers_short_prompts_perfectly(model, tmp_path):
    page = tmp_path / "quality.html"
    words = (
        *("quality", "--model", model, "--size", "screen", "--engine-args", SERVER),
        *("--suite", "needle", "--suite", "fidelity", "--json", "--html", str(page)),
        *("--candidate", "--kv-cache-dtype int8_per_token_head"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvtune", *words],
        env={**os.environ, "KVTUNE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == FAILED, done.stderr
    report = json.loads(done.stdout)
    figures = {(one["suite"], one["category"], one["metric"]): one for one in report["figures"]}
    divergence = figures["fidelity", "512-1k", "kl"]
    assert divergence["outcome"] == "fail"
    assert divergence["candidate"] > 1
    assert divergence["floor"]["estimate"] < 0.01
    assert figures["needle", "", "recall"]["outcome"] == "fail"
    assert report["samples"]
    assert "int8_per_token_head" in page.read_text()


@pytest.fixture
def terminated():
    """SIGTERM means afterwards what it meant before the command ran here."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_search_that_could_try_it_asks_its_server_and_keeps_the_stock_defaults(
    model, tmp_path, monkeypatch, capsys, terminated
):
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path))
    monkeypatch.setattr("kvtune.autotune.space.policies", lambda: {"kv_dtype": KvDtype})
    monkeypatch.setattr(KvDtype, "supports", lambda policy, ctx: Support.yes())
    monkeypatch.setattr("kvtune.policies.kv_dtype._offered", lambda ctx: ("int8_per_token_head",))
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Fidelity(),))
    workload = tmp_path / "w.jsonl"
    lengths = ("--input-tokens", "64", "--output-tokens", "8")
    make = ("workload", "make", "--requests", "24", *lengths, "-o", str(workload))
    search = (
        *("search", "--model", model, "--workload", str(workload), "--concurrency", "4"),
        *("--engine-args", f"--enforce-eager {SERVER}"),
        *("--budget", "2", "--finalists", "1", "--confirm-rounds", "2", "--no-probe"),
        *("--max-harm", "lossy", "--explore-lossy", "--quality", "kl <= 0.02", "--json"),
    )
    for words in (make, search):
        monkeypatch.setattr(sys, "argv", ["kvtune", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
    decision = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert (decision["outcome"], decision["recommended"]) == ("keep-baseline", 0)
    assert "1" in decision["rejected"]
    with open_store() as history:
        (study,) = history.studies()
        (row,) = history.quality_reports(study.name)
        asked = [history.trial(study.name, number).measurement.asked_s for number in (0, 1)]
    assert (row.trial, row.report.outcome, row.report.size) == (1, "fail", "screen")
    assert "int8_per_token_head" in row.report.candidate
    assert all(seconds > 0 for seconds in asked)
