"""The command line as a user has it: words in, text and an exit code out."""

import contextlib
import io
import json
import signal
import sys
from types import SimpleNamespace

import pytest

from kvtune.autotune.cli.app import main

GOALS = ("--goal", "p95 ttft <= 2s")
SEARCH = (
    *("search", "--engine", "simulated", "--model", "org/tiny", "--concurrency", "16"),
    *("--kv-memory", "64MiB", "--max-harm", "lossless", *GOALS),
    *("--budget", "4", "--finalists", "1", "--confirm-rounds", "2", "--no-probe"),
    "--no-early-stop",  # What each trial gives is looked at.
    "--engine-args",
    # Block sizes are all that is left to search.
    "--max-model-len 2048 --simulate-time-scale 0.05 --enable-prefix-caching "
    "--prefix-caching-hash-algo sha256 --max-num-seqs 64 --max-num-active-seqs 64 "
    "--max-num-batched-tokens 2048 --scheduler-reserve-full-isl --watermark 0.0",
)
"""Two long shared prefixes that end inside a block of 128: small blocks hold nearly twice as much,
so that block-size 32 wins by more than half."""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVTUNE_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def kvtune(capsys, monkeypatch):
    """Run `kvtune` with these words and expect an exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["kvtune", *map(str, words)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as ended:
            given = ended.code
        else:
            given = 0
        out, err = capsys.readouterr()
        assert (given or 0) == code, err or out
        return SimpleNamespace(out=out, err=err, json=lambda: json.loads(out))

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished search: its home, workload, words and study, and its decision as JSON."""
    home = tmp_path_factory.mktemp("finished")
    workload = home / "w.jsonl"
    make = (
        *("workload", "make", "--requests", "60", "--shared-prefixes", "2"),
        *("--prefix-tokens", "608", "--input-tokens", "uniform:16-32"),
        *("--output-tokens", "uniform:24-32", "-o", str(workload)),
    )
    words = (*SEARCH, "--workload", str(workload))
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTUNE_HOME", str(home))
        for argv in (make, (*words, "--json"), ("history", "--json")):
            patch.setattr(sys, "argv", ["kvtune", *argv])
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                main()
    decision, studies = map(json.loads, out.getvalue().splitlines())
    return SimpleNamespace(
        home=home, workload=workload, words=words, decision=decision, study=studies[0]["name"]
    )


@pytest.fixture
def after_search(finished, monkeypatch):
    """The command line in the home of a finished search."""
    monkeypatch.setenv("KVTUNE_HOME", str(finished.home))
    return finished
