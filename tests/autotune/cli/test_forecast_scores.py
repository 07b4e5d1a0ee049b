"""What a profile forecast is scored by a search, whether kvtune started the server or attached."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvtune.autotune.cli.app import app
from kvtune.autotune.cli.options import base_arguments
from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine

pytestmark = pytest.mark.integration

MODEL = "org/tiny"
MEMORY = "64MiB"
ARGUMENTS = (
    "--max-model-len 2048 --simulate-time-scale 0.05 --enable-prefix-caching "
    "--prefix-caching-hash-algo sha256 --max-num-seqs 64 --max-num-active-seqs 64 "
    "--max-num-batched-tokens 2048 --scheduler-reserve-full-isl --watermark 0.0"
)
"""Block sizes are all that is left to search, and a profile forecasts each of them."""


@pytest.fixture
def server(tmp_path):
    """A server that somebody else started, with the arguments of the search."""
    spec = ServerSpec(MODEL, arguments=base_arguments(ARGUMENTS, MEMORY))
    with SimulatedEngine().launch(spec, log_path=tmp_path / "server.log") as running:
        yield running.endpoint.url


@pytest.mark.parametrize("is_attached", [False, True])
def test_search_scores_what_a_profile_forecast(is_attached, kvtune, tmp_path, request):
    workload = tmp_path / "w.jsonl"
    made = ("--requests", 12, "--input-tokens", "uniform:200-400", "--output-tokens", 8)
    kvtune("workload", "make", *made, "-o", workload)
    load = ("--workload", workload, "--concurrency", 8, "--goal", "p95 ttft <= 2s")
    same = (*load, "--kv-memory", MEMORY, "--engine-args", ARGUMENTS)
    started = ("--engine", "simulated", "--model", MODEL)
    where = (
        ("--url", request.getfixturevalue("server")) if is_attached else (*started, "--no-probe")
    )
    kvtune("profile", *where, *same)
    told = kvtune("history", "forecasts", "--json").json()["forecasts"]
    assert told
    assert all(one["measured"] is None for one in told)
    budget = ("--budget", "2", "--finalists", "1", "--confirm-rounds", "2", "--no-probe")
    words = ("search", *started, *same, *budget, "--max-harm", "lossless")
    ended = CliRunner().invoke(app, [*map(str, words)])
    assert ended.exit_code in (0, 1), ended.output
    found = kvtune("history", "forecasts", "--json").json()["forecasts"]
    scored = [
        one
        for one in found
        if one["lever"].startswith("blocks of ") and one["measured"] is not None
    ]
    assert scored, "the trial measured a lever of the profile"
    (capacity,) = [one for one in scored if one["metric"] == "capacity_tokens"]
    # The model is not known, so what is left over of the pool is not either.
    assert abs(capacity["predicted"] - capacity["measured"]) < 256
