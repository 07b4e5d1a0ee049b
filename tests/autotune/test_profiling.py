"""From a stretch of load to a profile, with what is known of the server beside its counters."""

import psutil
import pytest
from contracts.decoding import Sequence, cells, decode
from contracts.landscape import DEVICE, GOAL, Recorder, run_of
from contracts.measuring import killed, measured_by_whom
from contracts.store_values import ENGINE

from kvtune.autotune import profiling
from kvtune.autotune.profiling import (
    Subject,
    as_told,
    device_ceilings,
    observed_concurrency,
    profile_of,
    runs_here,
)
from kvtune.errors import MissingExtra
from kvtune.profilers.probe import ProbeResult
from kvtune.profilers.scrape import ENGINES
from kvtune.profilers.step_gaps import join, observations
from kvtune.types import (
    Bottleneck,
    Ceilings,
    EffectiveConfig,
    EngineInfo,
    Goal,
    GpuUse,
    LoadRun,
    Profile,
    RequestRecord,
)

GPU = DEVICE.model_copy(update={"kind": "cuda"})
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
    assert profile.warnings[0] == "late"
    assert profile.verdict.bottleneck is Bottleneck.ABSTAIN, "a second is too short"
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_gpus_are_kept_where_it_is_known_that_the_server_runs_on_them():
    gpus = tuple(GpuUse(gpu=gpu, samples=3, power_w=300.0) for gpu in range(2))
    run = LoadRun((), 1.0, 0.0, COUNTERS, {}, gpus=gpus)
    cpu = EngineInfo(name="", version="", distribution="", platform="cpu", python=None)
    for kept, size, more in (
        (gpus, 2, {"endpoint_url": "http://127.0.0.1:1"}),
        ((), 1, {"endpoint_url": "http://127.0.0.1:1"}),  # It may run on either.
        ((), 2, {"endpoint_url": "http://10.0.0.7:1"}),
        (gpus, 2, {"endpoint_url": "", "engine": cpu.model_copy(update={"platform": "cuda"})}),
        ((), 2, {"endpoint_url": "", "engine": cpu}),
    ):
        subject = Subject(model=None, arguments={"tensor-parallel-size": size}, **more)
        profile = profile_of(subject, run, Goal(), is_load_ours=False)
        assert Profile.model_validate_json(profile.model_dump_json()).gpus == kept


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


COSTS = {"fixed_s": 0.04, "per_sequence_s": 0.001, "per_kv_token_s": 3e-6}
CEILINGS = Ceilings(
    device="cpu:x:1",
    read_bytes_per_s=10e9,
    copy_bytes_per_s=8e9,
    matrix_flop_per_s=1e12,
    matrix_dtype="bfloat16",
    threads=2,
    method="pretended",
    measured_at="",
)


def varied_load(**changed):
    requests = [Sequence(7 * i, 30 + 400 * (i % 5), 5 + 11 * (i % 7)) for i in range(80)]
    records = decode(requests, **{**COSTS, **changed})
    return LoadRun(tuple(records), records[-1].end_s, 0.1, COUNTERS, {})


def probe_result(plan, *notes, **changed):
    runs = cells(plan, **{**COSTS, **changed})
    seen = join([observations(run, blocks=1) for run in runs])
    return ProbeResult(seen, len(runs), 0, 0, 0, 1.0, notes)


def profiled(run, probed=None, *, model=None, ceilings=None):
    subject = Subject(model=model, endpoint_url="", device=DEVICE, arguments={})
    return profile_of(subject, run, GOAL, is_load_ours=True, ceilings=ceilings, probed=probed)


PROBED = [(1, 64, 20), (2, 64, 20), (8, 64, 20), (4, 500, 20), (4, 1500, 20)] * 2


def test_a_load_that_varies_tells_what_a_step_costs():
    profile = profiled(varied_load())
    assert profile.step_time.source == "load"
    assert profile.step_time.fixed_s.estimate == pytest.approx(0.04, rel=1e-3)
    assert profile.warnings == ()


def test_a_probe_is_believed_before_the_load():
    profile = profiled(varied_load(), probe_result(PROBED, "a note", fixed_s=0.08))
    assert profile.step_time.source == "probe"
    assert profile.step_time.fixed_s.estimate == pytest.approx(0.08, rel=1e-3)
    assert profile.warnings == ("a note",)


def test_the_load_stands_in_for_a_probe_that_saw_too_little():
    profile = profiled(varied_load(), probe_result(PROBED[:2], "it was interrupted"))
    assert profile.step_time.source == "load"
    assert profile.warnings == ("it was interrupted",)


def test_what_keeps_a_step_time_model_away_is_said():
    same = LoadRun(tuple(cells([(4, 64, 400)], **COSTS)[0]), 10.0, 0.1, COUNTERS, {})
    profile = profiled(same, probe_result(PROBED[:1]))
    assert profile.step_time is None
    assert [warning.partition(": ")[0] for warning in profile.warnings] == [
        "no step-time model of the probe",
        "no step-time model of the load",
    ]
    assert "hardly varied (4 to 4)" in profile.warnings[1]


def test_steps_of_several_engines_are_not_taken_for_those_of_one():
    load = varied_load()
    several = LoadRun(load.records, load.duration_s, 0.1, COUNTERS, {ENGINES: [(0.0, 2.0)]})
    profile = profiled(several, probe_result(PROBED))
    assert profile.step_time is None
    assert "several engines" in profile.warnings[0]


def test_ceilings_and_weights_divide_the_step(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1_000_000)
    profile = profiled(varied_load(), model=str(tmp_path), ceilings=CEILINGS)
    assert profile.ceilings == CEILINGS
    assert profile.step_time.weight_read_s == pytest.approx(1e-4)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize("plugin", [None, {"quest": {"pages": 8}}])
def test_the_rate_of_kv_reads_is_not_known_where_the_plugin_skips_some(plugin):
    effective = EffectiveConfig(
        kv_cache_memory_bytes=30_000 * 1600,
        num_gpu_blocks=100,
        block_size_tokens=16,
        plugin=plugin,
    )
    subject = Subject(model=None, endpoint_url="", arguments={}, effective=effective)
    model = profile_of(subject, varied_load(), GOAL, is_load_ours=True).step_time
    assert model.per_kv_token_s.estimate == pytest.approx(3e-6, rel=1e-2)
    if plugin is None:
        assert model.kv_bytes_per_s.estimate == pytest.approx(30_000 / 3e-6, rel=1e-2)
    else:
        assert model.kv_bytes_per_s is None


def test_what_a_server_says_of_its_limits_outweighs_what_the_user_does():
    says = EffectiveConfig(max_num_seqs=8, source=("server_info",))
    told = as_told(says, {"max-num-seqs": 4, "max-num-batched-tokens": "2K"})
    assert (told.max_num_seqs, told.max_num_batched_tokens) == (8, 2048)
    assert told.source == ("server_info", "arguments")
    assert as_told(says, {"max-num-seqs": 4}) == as_told(says, None) == says
    assert as_told(None, {"max-num-seqs": 4}) is None


def test_engines_that_differ_are_a_warning_of_the_profile():
    subject = Subject("m", "http://h", effective=EffectiveConfig(differs=("block_size (16, 32)",)))
    run = LoadRun((), 5.0, 0.0, COUNTERS, {})
    warnings = profile_of(subject, run, GOAL, is_load_ours=False).warnings
    assert any("differ in block_size (16, 32)" in warning for warning in warnings)
    alike = profile_of(Subject("m", "http://h"), run, GOAL, is_load_ours=False).warnings
    assert not any("differ" in warning for warning in alike)


@pytest.mark.parametrize(
    ("method", "is_said"),
    [
        ("load average before: 4.7, so that all figures may be low", True),
        ("load average before: 0.1", False),
    ],
)
def test_ceilings_of_a_busy_moment_are_a_warning_of_the_profile(method, is_said):
    ceilings = CEILINGS.model_copy(update={"method": method})
    run = LoadRun((), 5.0, 0.0, COUNTERS, {})
    profile = profile_of(Subject("m", ""), run, GOAL, is_load_ours=False, ceilings=ceilings)
    assert any("kvtune doctor --measure" in warning for warning in profile.warnings) is is_said


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://localhost:8000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8000/llm", True),
        ("http://0.0.0.0:8000", True),
        ("http://Box:8000", True),
        ("http://box.lan:8000", True),
        ("http://box.example:8000", False),
        ("http://gpu-box:8000", False),
        ("http://10.1.2.3:8000", False),
        ("", False),
    ],
)
def test_server_runs_here_if_its_address_names_this_machine(url, is_here, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    assert runs_here(url) is is_here


@pytest.fixture
def measuring(monkeypatch):
    """Which devices were measured."""
    asked = []

    def measure(device):
        asked.append(device.key)
        return CEILINGS.model_copy(update={"device": device.key})

    monkeypatch.setattr(profiling, "measure_ceilings", measure)
    return asked


def test_ceilings_of_a_device_are_measured_once_and_kept(store, measuring):
    reporter = Recorder()
    first = device_ceilings(ENGINE, DEVICE, store, reporter)
    assert device_ceilings(ENGINE, DEVICE, store, reporter) == first
    assert measuring == [DEVICE.key]
    assert first == store.ceilings(DEVICE.key)
    (note,) = reporter.notes
    assert note.startswith("measuring the memory bandwidth")


def test_gpu_is_measured_by_a_process_that_ends_and_so_leaves_its_memory(store, monkeypatch):
    monkeypatch.setattr(profiling, "measure_ceilings", measured_by_whom)
    found = device_ceilings(ENGINE, GPU, store, Recorder())
    assert found.device == GPU.key
    assert not psutil.pid_exists(int(found.method))


def test_gpu_whose_measuring_process_dies_is_not_known(store, monkeypatch):
    monkeypatch.setattr(profiling, "measure_ceilings", killed)
    reporter = Recorder()
    assert device_ceilings(ENGINE, GPU, store, reporter) is None
    assert "the process that measured this device died; try" in reporter.notes[-1]


def test_device_of_an_engine_that_pretends_is_not_measured(store, measuring):
    pretends = ENGINE.model_copy(update={"platform": "simulated"})
    assert device_ceilings(pretends, DEVICE, store, Recorder()) is None
    assert measuring == []


def test_device_that_cannot_be_measured_is_said_with_the_way_to(store, monkeypatch):
    def refuse(device):
        raise MissingExtra("torch is not installed", fix="pip install torch")

    monkeypatch.setattr(profiling, "measure_ceilings", refuse)
    reporter = Recorder()
    assert device_ceilings(ENGINE, DEVICE, store, reporter) is None
    assert "not known: torch is not installed; pip install torch" in reporter.notes[-1]
    assert store.ceilings(DEVICE.key) is None
