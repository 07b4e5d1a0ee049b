"""The command as a whole: help, versions, exit codes of a real process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer
from contracts.processes import is_alive

import kvtune as package
from kvtune.autotune.cli.app import app
from kvtune.errors import EngineError, KvtuneError, StoreError
from kvtune.types import FailureClass

KVTUNE = str(Path(sys.executable).with_name("kvtune"))


def commands(command, path=()):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


EVERY = list(commands(typer.main.get_command(app)))


def test_every_command_is_known():
    assert {" ".join(path) for path in EVERY} >= {
        *("profile", "search", "emit", "serve", "show", "doctor", "history"),
        *("history export", "history import", "workload inspect", "workload make"),
    }


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_command_has_help_with_an_example_that_fits_the_terminal(path, kvtune):
    said = kvtune(*path, "--help").out
    assert re.search(rf"Examples?:[\s•]*kvtune {' '.join(path)}", said)
    assert max(map(len, said.splitlines())) <= 80
    assert kvtune(*path, "-h").out == said


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_option_says_what_it_is_for(path):
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    nameless = [option.name for option in command.params if not getattr(option, "help", "")]
    assert nameless == []


def test_defaults_that_are_only_words_survive_the_markup(kvtune):
    assert "[default: from" in kvtune("search", "--help").out


def test_the_version_is_told(kvtune):
    assert kvtune("--version").out == f"kvtune {package.__version__}\n"


def test_no_words_are_answered_with_help(kvtune):
    assert "Usage: kvtune" in kvtune(code=2).out
    assert "Usage: kvtune workload" in kvtune("workload", code=2).out


def test_an_unknown_command_is_bad_input(kvtune):
    assert "No such command 'tune'" in kvtune("tune", code=2).err


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (KvtuneError("what", "do"), "KvtuneError", 2),
        (StoreError("what", "do"), "StoreError", 3),
        (
            EngineError(FailureClass.DOES_NOT_FIT, "what", "do", "the last line"),
            "does-not-fit",
            3,
        ),
    ],
)
def test_an_error_becomes_its_exit_code_and_its_words(error, kind, code, kvtune, monkeypatch):
    def fail(url):
        raise error

    monkeypatch.setattr("kvtune.autotune.cli.options.open_history", fail)
    said = kvtune("show", code=code)
    assert said.err.endswith("error: what\n  fix: do\n")
    assert ("the last line" in said.err) is isinstance(error, EngineError)
    told = kvtune("show", "--json", code=code).json()
    assert told["error"] == "what"
    assert told["fix"] == "do"
    assert told["kind"] == kind


# --- as a process -------------------------------------------------------------------------------


def process(home, *words):
    return subprocess.Popen(
        [KVTUNE, *map(str, words)],
        env={**os.environ, "KVTUNE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reader_that_has_seen_enough_is_no_failure(after_search):
    shown = process(after_search.home, "show", after_search.study)
    shown.stdout.close()
    assert shown.wait(30) == 0
    assert shown.stderr.read() == ""
    shown.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_search_with_its_decision_and_no_server(number, after_search, tmp_path):
    words = ("search", "--engine", "simulated", "--model", "org/tiny", "--concurrency", 2)
    slow = ("--engine-args", "--simulate-time-scale 50", "--workload", after_search.workload)
    search = process(tmp_path, *words, *slow)
    log = tmp_path / "logs"
    deadline_s = time.monotonic() + 30
    while not any("startup complete" in file.read_text() for file in log.rglob("*.log")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    tree = psutil.Process(search.pid).children(recursive=True)
    assert tree, "a server runs"
    search.send_signal(number)
    out, err = search.communicate(timeout=30)
    assert search.returncode == 130
    assert "Interrupted: deciding with what was measured" in err
    assert "Nothing was measured" in out
    assert [one for one in tree if is_alive(one)] == []
