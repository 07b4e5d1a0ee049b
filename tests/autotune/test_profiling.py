"""From a stretch of load to a profile, with what is known of the server beside its counters."""

import asyncio

import pytest
from contracts.landscape import DEVICE, GOAL, run_of

from kvtune.autotune.profiling import Subject, observed_concurrency, profile_of, watch
from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import EngineError
from kvtune.types import (
    Bottleneck,
    EffectiveConfig,
    Endpoint,
    FailureClass,
    Goal,
    LoadRun,
    Profile,
    RequestRecord,
)

COUNTERS = {"vllm:generation_tokens_total": 16.0}


def run_with(*spans):
    records = tuple(
        RequestRecord(index, sent_s, sent_s, sent_s, end_s, (), 1, 1, 1)
        for index, (sent_s, end_s) in enumerate(spans)
    )
    return LoadRun(records, 10.0, 0.0, {}, {})


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 2), (1, 3), (2, 4)], 2),
        ([(0, 9), (1, 2), (3, 4), (3, 5)], 3),
        ([(0, 1), (1, 2), (2, 3)], 1),
    ],
)
def test_the_most_requests_at_once_are_counted(spans, most):
    assert observed_concurrency(run_with(*spans)) == most


def test_a_replay_is_profiled_with_its_metrics_and_counters():
    run = LoadRun(run_of().records, 1.0, 0.1, COUNTERS, {}, ("late",))
    subject = Subject(model="org/m", endpoint_url="http://h:1", device=DEVICE, arguments={})
    profile = profile_of(subject, run, GOAL, is_load_ours=True)
    assert profile.model == "org/m"
    assert profile.endpoint_url == "http://h:1"
    assert profile.counters == COUNTERS
    assert profile.window_s == 1.0
    assert profile.metrics["requests_per_s"] == (4.0,)
    assert profile.warnings == ("late",)
    assert profile.verdict.bottleneck is Bottleneck.ABSTAIN, "a second is too short"
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_a_server_that_nobody_named_goes_by_the_name_that_it_serves():
    profile = profile_of(
        Subject(model=None, endpoint_url="", served_name="chat"),
        LoadRun((), 1.0, 0.0, {}, {}),
        Goal(),
        is_load_ours=False,
    )
    assert profile.model == "chat"
    assert profile.metrics == {}


def weights_row(profile):
    rows = {row.metric: row for row in profile.verdict.evidence}
    return rows["modelled_weight_reads_share"].value


@pytest.mark.parametrize(
    ("arguments", "device_count", "is_known"),
    [
        ({}, 1, True),
        ({"tensor-parallel-size": 2}, 2, True),
        (None, 1, True),
        (None, 2, False),
    ],
)
def test_weights_are_shared_by_the_devices_that_the_arguments_name(
    arguments, device_count, is_known, tmp_path
):
    """Where several devices are there and nobody said how many share the weights, it is unknown."""
    from kvtune.autotune.profiling import _weight_bytes

    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    device = DEVICE.model_copy(update={"kind": "cuda", "count": device_count})
    subject = Subject(
        model=str(tmp_path),
        endpoint_url="",
        device=device,
        arguments=arguments,
        effective=EffectiveConfig(),
    )
    sharing = (arguments or {}).get("tensor-parallel-size", 1)
    assert _weight_bytes(subject) == (1000 // sharing if is_known else None)


@pytest.fixture
def server(tmp_path):
    spec = ServerSpec("m", arguments={"simulate-time-scale": 0.01})
    with SimulatedEngine().launch(spec, log_path=tmp_path / "server.log") as running:
        yield running


def test_watching_samples_the_gauges_and_takes_the_counters_apart(server):
    seconds = []
    run = asyncio.run(watch(server.endpoint, 0.6, interval_s=0.1, on_second=seconds.append))
    assert run.records == ()
    assert run.duration_s == pytest.approx(0.6, abs=0.3)
    assert seconds[0] == pytest.approx(0.0, abs=0.2)
    assert set(run.counters.values()) == {0.0}, "nothing was sent"
    assert len(run.gauges["vllm:num_requests_running"]) >= 3
    assert run.warnings == ()


def test_a_page_that_cannot_be_read_is_a_failure():
    with pytest.raises(EngineError, match="/metrics cannot be read") as failure:
        asyncio.run(watch(Endpoint("http://127.0.0.1:9", "m"), 0.1))
    assert failure.value.failure is FailureClass.REQUEST_ERRORS
    assert failure.value.fix
