"""A real vLLM that is changed while it runs serves as one that was started so."""

import concurrent.futures
import re
import time

import pytest
from contracts.completions import complete
from contracts.processor import eager

from kvtune.engines.base import CannotChange, ServerSpec

pytestmark = pytest.mark.integration

BASE = eager(48, **{"enable-logging-iteration-details": True})
NARROW = {**BASE, "max-num-seqs": 3, "max-num-batched-tokens": 512, "watermark": 0.05}
LONG = [(position * 7919) % 40_000 + 100 for position in range(1500)]
MANY = [[(position * step) % 40_000 + 50 for position in range(200)] for step in range(3, 11)]


@pytest.fixture
def launch(warm, shallow, tmp_path):
    def launch(arguments, name):
        spec = ServerSpec(str(shallow), served_model_name="m", arguments=arguments)
        return warm.launch(spec, log_path=tmp_path / name, start_timeout_s=200)

    return launch


def answer(server, prompt, tokens):
    return complete(server.endpoint.url, prompt, tokens)


def steps_of(server, ask):
    """What `ask` returns, and the steps that it took: requests and tokens of prompts, of answers.

    vLLM logs each step a moment after its answers went out.
    """
    before = server.log_path.stat().st_size
    answered = ask()
    time.sleep(1.0)
    with server.log_path.open("rb") as log:
        log.seek(before)
        found = re.findall(
            r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
            r"(\d+) generation requests, (\d+) generation tokens",
            log.read().decode(),
        )
    return [tuple(map(int, step)) for step in found], answered


def prefill(server):
    """The tokens in each step of a lone prompt, and its first token."""
    steps, token = steps_of(server, lambda: answer(server, LONG, 1))
    return [tokens for _, tokens, _, _ in steps], token


def most_at_once(server):
    """The most requests that shared a step when more than that came at once."""

    def ask():
        with concurrent.futures.ThreadPoolExecutor(len(MANY)) as pool:
            return list(pool.map(lambda prompt: answer(server, prompt, 40), MANY))

    steps, answers = steps_of(server, ask)
    assert {len(answer) for answer in answers} == {40}
    return max(prompts + decodes for prompts, _, decodes, _ in steps)


def test_a_changed_server_serves_as_one_that_was_started_so(launch):
    with launch(BASE, "changed") as changed, launch(NARROW, "started") as started:
        whole, token = prefill(changed)
        assert whole == [1500]
        effective = changed.change(NARROW)

        assert (effective.start_kind, effective.source[0]) == ("live", "scheduler")
        same = {"start_kind": None, "source": ()}
        assert effective.model_copy(update=same) == started.effective.model_copy(update=same)
        assert changed.warnings == ()
        # Nothing of the prompt is found in a cache, and a step takes 512 of it.
        assert prefill(changed) == prefill(started) == ([512, 512, 476], token)
        assert most_at_once(changed) == most_at_once(started) == 3
        assert answer(changed, LONG, 32) == answer(started, LONG, 32)

        with pytest.raises(CannotChange, match="at most 2048"):
            changed.change({**BASE, "max-num-batched-tokens": 4096})
        changed.change(BASE)
        assert prefill(changed) == (whole, token)
        assert most_at_once(changed) > 3
