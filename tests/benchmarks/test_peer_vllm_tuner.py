"""What vllm-tuner is asked and what its answer means."""

import json
import subprocess
import sys
from types import SimpleNamespace

import peer_vllm_tuner
import psutil
import pytest
from peer_case import FIXED, HELDOUT_SEED, Setting, cases, got_through, settings_text
from peer_vllm_tuner import Tuner, arguments_of, config_of, found_of

SETTING = Setting(cases()["capacity"], "model")


@pytest.mark.parametrize(
    ("measure", "metric"),
    [("shipped", "output_tokens_per_sec"), ("ours", "throughput_req_per_sec")],
)
def test_it_gets_the_server_and_the_load_as_far_as_it_can_be_told(tmp_path, measure, metric):
    config = config_of(SETTING, Tuner(tmp_path, measure), tmp_path)
    assert config["static_parameters"] == {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 13 << 20,
        "max_model_len": 2048,
    }
    # Of random letters, SmolLM2 makes 2.23 tokens where it means to send one.
    assert config["benchmark"]["prompt_tokens"] * 2.23 == pytest.approx(608 + 24, abs=2)
    assert config["benchmark"]["output_tokens"] == 24
    assert config["benchmark"]["concurrent_requests"] == 20
    assert config["optimization"]["objectives"] == [{"metric": metric, "direction": "maximize"}]
    json.dumps(config)


def test_its_floats_and_texts_become_arguments():
    best = {"max_num_seqs": 48.0, "block_size": "32", "kv_cache_dtype": "fp8", "flag": "true"}
    found = arguments_of(best)
    assert found == {"max-num-seqs": 48, "block-size": 32, "kv-cache-dtype": "fp8", "flag": True}
    assert type(found["max-num-seqs"]) is int
    assert arguments_of(None) == {}


def test_its_baseline_is_a_launch_and_only_starts_that_failed_are_failed_launches():
    trials = [
        {"status": "completed", "error_message": None},
        {"status": "failed", "error_message": "Server failed to start: too large"},
        {"status": "failed", "error_message": "Benchmark returned no results"},
    ]
    result = {"best": None, "value": None, "trials": 4, "values": []}
    found = found_of(result, 60.0, trials)
    assert (found.launches, found.failed_launches, found.arguments) == (5, 1, {})


def test_cases_leave_all_levers_to_who_tunes_and_keep_requests_apart():
    for name, case in cases().items():
        assert name == "try" or set(case.base_arguments) <= set(FIXED)
        assert case.limits.slos
        assert len(case.requests(0, times=2)) == 2 * case.load.requests
        assert case.requests(0) == case.requests(0) != case.requests(HELDOUT_SEED)


def test_settings_are_told_in_one_line():
    assert settings_text({}) == "stock"
    assert settings_text({"b": True, "a": 8}) == "a 8, b on"


def test_a_load_of_which_more_than_one_in_a_hundred_failed_did_not_get_through():
    def run(failed, of):
        return SimpleNamespace(records=[SimpleNamespace(ok=at >= failed) for at in range(of)])

    assert got_through(run(1, 100))
    assert not got_through(run(2, 100))
    assert not got_through(run(0, 0))


def test_a_server_that_it_leaves_when_it_crashes_is_ended(monkeypatch):
    monkeypatch.setattr(peer_vllm_tuner, "GRACE_S", 0.1)
    monkeypatch.setattr(peer_vllm_tuner, "LOOK_S", 0.05)
    crashing = (
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(2)\n"
    )
    command = [sys.executable, "-c", crashing]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = psutil.Process(int(process.stdout.readline()))
        peer_vllm_tuner._end_after(process, 60.0)
    _, alive = psutil.wait_procs([server], timeout=30)
    assert not alive
