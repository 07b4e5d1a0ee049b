"""The real model that integration tests serve, whole and in part, and vLLM in forks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from verdict_models import cut_model

SHALLOW_LAYERS = 8


@pytest.fixture(scope="session")
def model():
    path = os.environ.get("KVTUNE_TEST_MODEL")
    if not path:
        pytest.fail("set KVTUNE_TEST_MODEL to a checkpoint directory, or run: make integration")
    return path


@pytest.fixture(scope="session")
def shallow(model, tmp_path_factory):
    """The first `SHALLOW_LAYERS` of the model's 30, which compute as exactly, and much sooner."""
    return cut_model(Path(model), SHALLOW_LAYERS, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def warm():
    """An engine whose servers are forks of one process that has imported vLLM."""
    from kvtune.engines.vllm.engine import VllmEngine

    with VllmEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def ask():
    """What a module beside this one `answers`, in a process of its own that has vLLM already."""
    program = [sys.executable, str(Path(__file__).with_name("vllm_forks.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, **pipes) as process:

        def ask(program, model, *, may_fail=False, **wanted):
            asked = {"program": program, "wanted": {"model": str(model), **wanted}}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            assert may_fail or "failed" not in told, "vLLM ended; its log is above"
            return told

        yield ask
        process.stdin.close()
