"""Watching a real vLLM that others use, up to its violent end."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contracts.processor import eager

from kvtune.engines.base import ServerSpec
from kvtune.engines.vllm.engine import VllmEngine
from kvtune.types import Profile

pytestmark = pytest.mark.integration

KVTUNE = str(Path(sys.executable).with_name("kvtune"))
ARGUMENTS = eager(256)


def keep_asking(url):
    """One user after another, until the server is gone."""
    body = {"model": "m", "prompt": list(range(9, 99)), "max_tokens": 24, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        while True:
            urllib.request.urlopen(request, timeout=60).close()
    except (OSError, urllib.error.URLError):
        return


def test_an_engine_that_is_killed_leaves_a_partial_profile(model, tmp_path):
    spec = ServerSpec(model, served_model_name="m", arguments=ARGUMENTS)
    with (
        VllmEngine() as engine,
        engine.launch(spec, log_path=tmp_path / "server.log", start_timeout_s=200) as server,
        ThreadPoolExecutor(2) as users,
    ):
        url = server.endpoint.url
        for _ in range(2):
            users.submit(keep_asking, url)
        watching = subprocess.Popen(
            [KVTUNE, "profile", "--url", url, "--duration", "40s", "--json"],
            env={**os.environ, "KVTUNE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watching:
            assert any("watching m" in line for line in watching.stderr)
            time.sleep(8)
            os.killpg(os.getpgid(server.endpoint.pid), signal.SIGKILL)
            out, err = watching.communicate(timeout=60)
    assert watching.returncode == 3, err
    assert "Traceback" not in err
    profile = Profile.model_validate_json(out)
    assert profile.counters["vllm:generation_tokens_total"] > 0
    assert 3 < profile.window_s < 30
    assert any("could not be read any more" in warning for warning in profile.warnings)
