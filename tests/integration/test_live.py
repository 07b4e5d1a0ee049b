"""A real vLLM that is changed while it runs serves as one that was started so."""

import concurrent.futures
import json
import re
import time
import urllib.request

import pytest

from kvtune.engines.base import CannotChange, ServerSpec
from kvtune.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.integration

BASE = {"enforce-eager": True, "kv-cache-memory-bytes": "48M", "max-model-len": 2048}
NARROW = {**BASE, "max-num-seqs": 3, "max-num-batched-tokens": 512, "watermark": 0.05}
LONG = [(position * 7919) % 40_000 + 100 for position in range(1500)]
MANY = [[(position * step) % 40_000 + 50 for position in range(200)] for step in range(3, 11)]


@pytest.fixture
def launch(model, tmp_path):
    with VllmEngine() as engine:

        def launch(arguments, name):
            spec = ServerSpec(model, served_model_name="m", arguments=arguments)
            return engine.launch(spec, log_path=tmp_path / name, start_timeout_s=200)

        yield launch


def complete(server, prompt, tokens):
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.endpoint.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def page(server):
    with urllib.request.urlopen(f"{server.endpoint.url}/metrics", timeout=10) as answer:
        return answer.read().decode()


def step_sizes(server):
    """How many steps there were so far with at most so many tokens, by that bound."""
    time.sleep(0.5)  # Until the engine has told of its last step.
    found = re.findall(r'iteration_tokens_total_bucket{.*le="([^"]+)"} (\S+)', page(server))
    return {float(bound): float(count) for bound, count in found}


def sizes_of(server, prompt):
    """The sizes of the steps that a lone prompt takes with its first token, and that token."""
    before = step_sizes(server)
    tokens = complete(server, prompt, 1)
    after = step_sizes(server)
    return {bound: after[bound] - before[bound] for bound in after}, tokens


def most_running(server):
    with concurrent.futures.ThreadPoolExecutor(len(MANY)) as pool:
        asked = [pool.submit(complete, server, prompt, 40) for prompt in MANY]
        most = 0.0
        while not all(one.done() for one in asked):
            (running,) = re.findall(r"vllm:num_requests_running{.*} (\S+)", page(server))
            most = max(most, float(running))
    return most, [one.result() for one in asked]


def test_a_changed_server_serves_as_one_that_was_started_so(launch):
    with launch(BASE, "changed") as changed, launch(NARROW, "started") as started:
        wide, token = sizes_of(changed, LONG)
        assert wide[1024.0] == 0, "all of the prompt is one step"
        effective = changed.change(NARROW)

        assert (effective.start_kind, effective.source[0]) == ("live", "scheduler")
        same = {"start_kind": None, "source": ()}
        assert effective.model_copy(update=same) == started.effective.model_copy(update=same)
        assert changed.warnings == ()
        narrow, again = sizes_of(changed, LONG)
        assert narrow[512.0] == 3, "1,500 tokens are three steps of at most 512, and none is cached"
        assert sizes_of(started, LONG) == (narrow, token)
        assert again == token
        for server in (changed, started):
            most, answers = most_running(server)
            assert most == 3
            assert len({len(answer) for answer in answers}) == 1
        assert complete(changed, LONG, 32) == complete(started, LONG, 32)

        with pytest.raises(CannotChange, match="at most 2048"):
            changed.change({**BASE, "max-num-batched-tokens": 4096})
        changed.change(BASE)
        assert sizes_of(changed, LONG) == (wide, token)
        most, _ = most_running(changed)
        assert most > 3
