"""`kvtune profile` on real simulated servers."""

import json
import urllib.request

import pytest
from contracts.fake_vllm import fake_vllm, vllm_page
from contracts.forecast_baseline import CONFIG
from contracts.pages import Parsed
from typer.testing import CliRunner

from kvtune.autotune.cli.app import app
from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput, EngineError
from kvtune.profilers.scrape import parse_metrics
from kvtune.store import open_store
from kvtune.types import FailureClass, Profile


@pytest.fixture
def serve(tmp_path):
    """Starts a simulated server that serves `m`; returns its address."""
    running = []

    def start(**options):
        arguments = {name.replace("_", "-"): value for name, value in options.items()}
        spec = ServerSpec("m", arguments={"simulate-time-scale": 0.05, **arguments})
        running.append(SimulatedEngine().launch(spec, log_path=tmp_path / "server.log"))
        return running[-1].endpoint.url

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def load(tmp_path):
    """A workload of ten lengths."""
    path = tmp_path / "load.jsonl"
    path.write_text('{"input_tokens": 40, "output_tokens": 8}\n' * 10)
    return path


@pytest.fixture
def profile(load, tmp_path, monkeypatch):
    """Runs the command on a workload; returns the profile."""
    monkeypatch.setenv("KVTUNE_STORE", str(tmp_path / "kvtune.db"))
    workload = load

    def run(*words, load=True):
        asked = ["--workload", str(workload), "--concurrency", "4"] if load else []
        result = CliRunner().invoke(app, ["profile", "--json", *asked, *words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def rows(profile):
    return {row["metric"]: row for row in profile["verdict"]["evidence"]}


def test_an_attached_server_that_rejects_everything_is_a_failure_not_idle(serve, profile):
    url = serve(simulate_error_rate=1.0)
    with pytest.raises(EngineError) as error:
        profile("--url", url)
    assert error.value.failure is FailureClass.REQUEST_ERRORS
    assert error.value.exit_code == 3
    assert "10 of 10 requests failed" in error.value.message


def test_the_name_of_a_served_model_is_not_looked_up_on_this_disk(
    serve, profile, tmp_path, monkeypatch
):
    checkpoint = tmp_path / "m"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"w" * (1 << 20))
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    url = serve(kv_cache_memory_bytes=512 << 20)
    attached = profile("--url", url)
    assert attached["model"] == "m"
    assert rows(attached)["modelled_weight_reads_share"]["value"] is None
    told = profile("--url", url, "--model", "./m")
    assert told["model"] == str(checkpoint)
    assert rows(told)["modelled_weight_reads_share"]["value"] > 0


def test_a_profile_needs_a_server_and_a_server_of_its_own_a_load(profile):
    with pytest.raises(BadInput, match="needs a server"):
        profile()
    with pytest.raises(BadInput, match="no traffic of its own"):
        profile("--model", "org/name", "--engine", "simulated", load=False)


def test_a_server_that_crashes_before_the_load_is_told_by_its_crash(profile):
    crash = "--simulate-crash-after-requests 2 --simulate-time-scale 0.05"
    with pytest.raises(EngineError, match="simulated crash after 2 requests") as caught:
        profile("--model", "org/name", "--engine", "simulated", "--engine-args", crash)
    assert caught.value.failure is FailureClass.CRASH_UNDER_LOAD


def test_a_server_that_crashes_under_the_load_leaves_a_partial_profile(load, kvtune, tmp_path):
    # Four requests warm it up, and four of the ten of the load come through.
    crash = "--simulate-crash-after-requests 8 --simulate-time-scale 0.05"
    words = ("--model", "org/name", "--engine", "simulated", "--engine-args", crash)
    said = kvtune("profile", *words, "--workload", load, "--concurrency", 1, "--json", code=3)
    found = Profile.model_validate_json(said.out)
    assert found.metrics["failed_requests"][0] > 0
    assert any("simulated crash after 8 requests" in warning for warning in found.warnings)
    assert found.step_time is None, "there was no server left to probe"
    err = " ".join(said.err.split())
    assert "the server died: " in err
    assert "the profile is of what was seen until then" in err
    assert "from the server's log: " in err
    with open_store(tmp_path / "home" / "kvtune.db") as store:
        (row,) = store.profiles()
    assert row.profile == found.model_copy(update={"forecasts": ()})


def test_arguments_are_checked_before_a_server_is_started(profile):
    with pytest.raises(BadInput, match="did you mean --block-size"):
        profile("--model", "org/n", "--engine", "simulated", "--engine-args", "--blok-size 32")


FAST = ("--engine-args", "--simulate-time-scale 0.02 --kv-cache-memory-bytes 512M")


def test_a_server_is_started_profiled_probed_and_stopped(profile):
    found = profile("--model", "org/name", "--engine", "simulated", *FAST, "--probe-time", "10s")
    assert found["model"] == "org/name"
    assert found["metrics"]["failed_requests"] == [0.0]
    assert any("vocabulary is not known" in warning for warning in found["warnings"])
    assert found["step_time"]["source"] == "probe"
    assert found["step_time"]["fixed_s"]["estimate"] > 0
    assert found["counters"]["vllm:generation_tokens_total"] == 80, "of the load alone"
    assert found["ceilings"] is None, "those of this machine say nothing of a simulated one"


def test_a_probe_can_be_left_out(profile):
    found = profile("--model", "org/name", "--engine", "simulated", *FAST, "--no-probe")
    assert found["step_time"] is None


def test_the_cost_of_a_probe_is_said_before_it(serve, kvtune):
    words = ("profile", "--url", serve(), "--duration", "500ms", "--probe-time", "1.5s")
    asked = kvtune(*words, "--probe")
    assert "probing decode steps: at most 1.5 s" in " ".join(asked.err.split())
    assert "age out of the prefix cache" in " ".join(asked.out.split())


def test_an_attached_server_is_not_probed_unasked(serve, kvtune):
    url = serve()
    kvtune("profile", "--url", url, "--duration", "500ms")
    page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert "vllm:prompt_tokens_total" in page
    assert parse_metrics(page).counters["vllm:prompt_tokens_total"] == 0


def test_what_a_probe_cannot_do_is_said(serve, kvtune):
    words = ("--duration", "500ms", "--probe", "--probe-time", "2s")
    said = kvtune("profile", "--url", serve(max_num_seqs=1), *words)
    assert "probing" not in said.err
    assert "batches cannot vary" in " ".join(said.out.split())


@pytest.mark.parametrize("probe_time", ["5", "fast"])
def test_the_time_of_a_probe_has_a_unit(kvtune, probe_time):
    words = ("profile", "--url", "http://localhost:1", "--probe-time", probe_time)
    assert "is not a time" in kvtune(*words, code=2).err


def test_levers_are_forecast_from_the_load_and_kept(serve, profile, tmp_path):
    url = serve(kv_cache_memory_bytes=512 << 20)
    told = profile("--url", url)["forecasts"]
    by_lever = {one["lever"]: one for one in told if one["metric"] == "capacity_tokens"}
    # The server has 182 blocks of 128 tokens; the model's bytes are not known.
    doubled = by_lever["kv memory x2"]
    assert doubled["predicted"] / doubled["baseline"] == pytest.approx(2.0, abs=0.01)
    assert "but the load fills" in doubled["reason"]
    assert by_lever["kv offload"]["predicted"] is None
    with open_store(tmp_path / "kvtune.db") as store:
        assert len(store.forecasts()) == len(told)
        assert store.profiles()[0].profile.forecasts == ()


def test_a_profile_is_kept_though_its_forecasts_are_cut_short(
    serve, profile, tmp_path, monkeypatch
):
    def interrupted(*found, **options):
        raise InterruptedError("while forecasting")

    monkeypatch.setattr("kvtune.autotune.forecast.tell.forecasts_of", interrupted)
    with pytest.raises(InterruptedError, match="while forecasting"):
        profile("--url", serve())
    with open_store(tmp_path / "kvtune.db") as store:
        assert [row.profile.model for row in store.profiles()] == ["m"]


def test_without_a_load_what_fits_is_forecast_and_what_the_rest_needs_is_said_once(
    serve, kvtune, tmp_path
):
    url = serve(kv_cache_memory_bytes=512 << 20)
    words = ("profile", "--url", url, "--duration", "500ms")
    told = kvtune(*words, "--json").json()["forecasts"]
    doubled = {one["metric"]: one for one in told if one["lever"] == "kv memory x2"}
    capacity = doubled["capacity_tokens"]
    # The server has 182 blocks of 128 tokens; the model's bytes are not known.
    assert capacity["predicted"] / capacity["baseline"] == pytest.approx(2.0, abs=0.01)
    assert doubled["goodput_requests_per_s"]["predicted"] is None
    said = " ".join(kvtune(*words).out.split())
    assert said.count("step time, TTFT and goodput need a workload: add --workload") == 1
    assert "kv memory x2 46," in said
    with open_store(tmp_path / "home" / "kvtune.db") as store:
        assert store.forecasts() == [], "no trial measures what was told of no load"


def test_a_server_of_unknown_size_is_said_to_be_that(kvtune):
    with fake_vllm(lambda: vllm_page().replace("num_gpu_blocks", "other")) as fake:
        said = kvtune("profile", "--url", fake.url, "--duration", "500ms")
    err = " ".join(said.err.split())
    assert "nothing is forecast: the size of the pool is not known" in err
    assert "need a workload: add --workload" in err


def test_a_stack_is_forecast_beside_the_levers(serve, kvtune, load, tmp_path):
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    stack = "snapkv:budget_tokens=24,window_tokens=8 + vllm-fp8"
    words = ("profile", "--url", serve(kv_cache_memory_bytes=512 << 20), "--model", checkpoint)
    words = (*words, "--workload", load, "--concurrency", 4, "--stack", stack)
    found = kvtune(*words, "--json").json()
    (capacity,) = [
        one
        for one in found["forecasts"]
        if (one["lever"], one["metric"]) == (stack, "capacity_tokens")
    ]
    assert capacity["predicted"] > 2 * capacity["baseline"]
    said = kvtune(*words).out
    assert f"- {stack}: " in " ".join(said.split()), "the reason of what was asked for is told"
    with open_store(tmp_path / "home" / "kvtune.db") as store:
        assert stack in {one.lever for one in store.forecasts()}


def test_a_stack_that_cannot_be_read_is_refused_before_anything_is_sent(kvtune):
    words = ("profile", "--url", "http://localhost:1", "--stack", "snapkw")
    assert "unknown method 'snapkw'" in kvtune(*words, code=2).err


def test_a_page_is_written_beside_the_result(serve, kvtune, load, tmp_path):
    page = tmp_path / "pages" / "profile.html"
    words = ("profile", "--url", serve(kv_cache_memory_bytes=512 << 20), "--concurrency", 4)
    said = kvtune(*words, "--workload", load, "--html", page)
    assert str(page) in "".join(said.err.split())
    found = Parsed(page.read_text())
    assert found.texts["h1"] == ["Profile of m"]
    assert "Lengths of prompts." in found.plots
    assert "Forecasts" in found.texts["h2"], "figures or not: those need a quiet machine"
    assert "prompt tokens: mean 40" in said.out
    assert "arrivals as sent" in said.out
    assert "roofline without the device's ceilings" in " ".join(said.out.split())


def test_a_server_that_is_only_watched_gets_a_page_too(serve, kvtune, tmp_path):
    page = tmp_path / "p.html"
    kvtune("profile", "--url", serve(), "--duration", "500ms", "--html", page)
    text = page.read_text()
    found = Parsed(text)
    assert "the requests of others" not in found.texts["h1"]
    assert "Forecasts" in found.texts["h2"]
    assert "add --workload" in text


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_sent(kvtune, tmp_path):
    words = ("profile", "--url", "http://localhost:1", "--html", tmp_path)
    assert f"{tmp_path} cannot be written" in "".join(kvtune(*words, code=2).err.splitlines())
