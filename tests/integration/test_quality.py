"""On a real vLLM, a KV format that returns garbage is rejected within the screen."""

import json
import os
import subprocess
import sys

import pytest

from kvtune.autotune.cli.quality import FAILED

pytestmark = pytest.mark.integration

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
