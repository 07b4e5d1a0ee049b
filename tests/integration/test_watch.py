"""Watching a real vLLM that others use, up to its violent end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest
from contracts.completions import complete
from contracts.processor import eager

from kvtune.engines.base import ServerSpec
from kvtune.types import Profile

pytestmark = pytest.mark.integration

KVTUNE = str(Path(sys.executable).with_name("kvtune"))
ARGUMENTS = eager(256)


def keep_asking(url):
    """One user after another, until the server is gone."""
    with contextlib.suppress(OSError, HTTPException):
        while True:
            complete(url, range(9, 99), 24)


def test_an_engine_that_is_killed_leaves_a_partial_profile(warm, shallow, tmp_path):
    spec = ServerSpec(str(shallow), served_model_name="m", arguments=ARGUMENTS)
    with (
        warm.launch(spec, log_path=tmp_path / "server.log", start_timeout_s=200) as server,
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
