"""Ask a program of tests/integration that runs vLLM in forks (`vllm_forks`)."""

import contextlib
import json
import subprocess
import sys


@contextlib.contextmanager
def forks(program, model):
    """Start it on a model; yields `ask(wanted)`, which returns what a fork of its own tells."""
    with subprocess.Popen(
        [sys.executable, program, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(wanted, *, may_fail=False):
            process.stdin.write(json.dumps(wanted) + "\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            assert may_fail or "failed" not in told, "vLLM ended; its log is above"
            return told

        yield ask
        process.stdin.close()
