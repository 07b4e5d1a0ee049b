"""`kvtune doctor`: what is usable, and the fix for what is not."""

import json
import sys

import pytest
from contracts.fake_nvml import FakeNvml

from kvtune import __version__
from kvtune.autotune.cli import doctor
from kvtune.errors import KvtuneError
from kvtune.kernels import ceilings
from kvtune.kernels.device import detect_device
from kvtune.kernels.nvml import GpuSample
from kvtune.store import open_store
from kvtune.types import Ceilings, EngineInfo

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
}
BROKEN_VLLM = ("--engine-python", "/no/such/python")


@pytest.fixture
def checks(kvtune):
    """Run doctor where vLLM is missing for sure; returns the checks by name."""

    def run(*words, code=2):
        found = kvtune("doctor", *BROKEN_VLLM, *words, "--json", code=code).json()
        assert all(set(check) == {"name", "ok", "found", "fix"} for check in found)
        return {check["name"]: check for check in found}

    return run


def test_what_is_there_is_ok_and_what_is_broken_has_a_fix(checks, tmp_path):
    found = checks()
    assert found["python"]["ok"] is True
    assert found["device"]["ok"] is True
    assert found["history"]["found"] == f"0 studies in {tmp_path / 'home' / 'kvtune.db'}"
    assert found["vllm"]["ok"] is False
    assert "/no/such/python" in found["vllm"]["found"]
    assert found["vllm"]["fix"]
    assert found["gpu"]["ok"] in (True, None), "a GPU is no must"


def test_the_text_says_the_same(kvtune):
    said = kvtune("doctor", *BROKEN_VLLM, code=2).out.splitlines()
    assert said[0].startswith("ok   python   3.")
    bad = next(line for line in said if line.startswith("bad "))
    assert bad.startswith("bad  vllm")
    assert said[said.index(bad) + 1].lstrip().startswith("fix: ")


def test_a_whole_checkpoint_is_measured_up(checks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"x" * (3 << 20))
    found = checks("--model", tmp_path)["model"]
    assert found["ok"] is True
    # Keys and values of 2 layers, 2 heads of 32 numbers of 2 bytes.
    assert found["found"] == "LlamaForCausalLM, 3 MiB of weights, 512 KV bytes a token"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no config.json"),
        ({"config.json": json.dumps(CONFIG)}, "holds no weight files"),
        ({"config.json": "{}"}, ""),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_bad(files, message, checks, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = checks("--model", tmp_path)["model"]
    assert found["ok"] is False
    assert message in found["found"]
    assert found["fix"]


def test_a_hub_id_is_no_directory(checks):
    assert "does not exist" in checks("--model", "org/name")["model"]["found"]


def test_a_history_that_cannot_be_opened_is_bad(checks, tmp_path):
    (tmp_path / "file").write_text("not a database, and long enough to be looked at" * 40)
    found = checks("--store", tmp_path / "file")["history"]
    assert found["ok"] is False
    assert found["fix"]


# --- ceilings ---


def reached(device, threads=2, **update):
    return Ceilings(
        device=device.key,
        read_bytes_per_s=85.04e9,
        copy_bytes_per_s=50.36e9,
        matrix_flop_per_s=904e9,
        matrix_dtype="bfloat16",
        threads=threads,
        method="best pass",
        measured_at="2026-11-29T12:00:00+00:00",
    ).model_copy(update=update)


SAID = (
    "reads 85.0 GB/s, copies 50.4 GB/s, 0.904 TFLOP/s in bfloat16 with 2 threads "
    "(measured 2026-11-29: best pass)"
)


def test_ceilings_that_were_never_measured_are_no_fault_and_say_how_to(checks):
    found = checks()["ceilings"]
    assert (found["ok"], found["fix"]) == (None, "kvtune doctor --measure")


def test_ceilings_are_measured_when_asked_for_and_shown_ever_after(checks, monkeypatch):
    measured = []

    def measure(device):
        measured.append(device)
        return reached(device)

    monkeypatch.setattr(ceilings, "measure_ceilings", measure)
    assert checks("--measure")["ceilings"] == {
        "name": "ceilings",
        "ok": True,
        "found": SAID,
        "fix": "",
    }
    assert checks()["ceilings"]["found"] == SAID
    assert measured == [detect_device()]


def test_ceilings_of_another_device_are_not_shown(checks, tmp_path):
    other = detect_device().model_copy(update={"name": "Another CPU"})
    with open_store(tmp_path / "home" / "kvtune.db") as store:
        store.save_ceilings(reached(other))
    assert checks()["ceilings"]["ok"] is None


def test_ceilings_of_a_gpu_have_no_threads(checks, tmp_path):
    with open_store(tmp_path / "home" / "kvtune.db") as store:
        store.save_ceilings(reached(detect_device(), threads=None, matrix_flop_per_s=7.912e14))
    assert "791 TFLOP/s in bfloat16 (measured" in checks()["ceilings"]["found"]


def test_a_device_that_cannot_be_measured_is_bad_and_has_a_fix(checks, monkeypatch):
    def measure(device):
        raise KvtuneError("there is no torch", fix="install it")

    monkeypatch.setattr(ceilings, "measure_ceilings", measure)
    found = checks("--measure")["ceilings"]
    assert (found["ok"], found["found"]) == (False, "not known: there is no torch")
    assert found["fix"] == "install it"


def test_ceilings_that_cannot_be_kept_are_still_told(checks, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a database, and long enough to be looked at" * 40)
    monkeypatch.setattr(ceilings, "measure_ceilings", reached)
    found = checks("--store", tmp_path / "file", "--measure")["ceilings"]
    assert found["ok"] is False
    assert found["found"].startswith(f"{SAID}; not kept: ")
    assert checks("--store", tmp_path / "file")["ceilings"]["ok"] is None


def test_this_machine_is_measured_and_remembered(checks, monkeypatch):
    # Small buffers: what is reached does not matter here, and 3 s would be long.
    monkeypatch.setattr(ceilings, "buffer_bytes", lambda threads, cache, free: 1 << 20)
    monkeypatch.setattr(ceilings.measure_ceilings, "__defaults__", (None, 0.01))
    monkeypatch.setitem(sys.modules, "torch", None)
    first = checks("--measure")["ceilings"]
    assert first["ok"] is True
    assert "float32" in first["found"]
    assert checks()["ceilings"] == first


# --- GPUs ---


def test_shares_of_what_the_gpu_could_do_are_told_with_the_rest(checks, monkeypatch):
    """A fake NVML: what a real one says of a real GPU was not seen here."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = checks()
    assert found["gpu"]["found"] == "1 x NVIDIA H100, driver 570.86"
    assert found["gpu 0"]["found"].startswith(
        "30.0 GiB used, 97% busy, 80% of the SMs at work, tensor cores 12% of the time, "
        "90% of the memory bandwidth, 352 W"
    )


def test_what_a_gpu_does_now_is_said_as_far_as_it_tells():
    seen = GpuSample(
        at_s=0.0,
        gpu=0,
        memory_used_bytes=30 << 30,
        power_w=351.5,
        sm_clock_mhz=1755,
        memory_clock_mhz=2619,
        slowed_by=("power cap",),
        busy_ratio=0.97,
    )
    assert doctor._gpu_state(seen) == (
        "30.0 GiB used, 97% busy, 352 W, SMs at 1755 MHz, memory at 2619 MHz, "
        "held back by power cap"
    )
    assert doctor._gpu_state(GpuSample(at_s=0.0, gpu=1, power_w=20.0)) == "20 W"


# --- the plugin ---


def beside(**changes):
    facts = {"name": "vllm", "version": "0.32.0", "distribution": "vllm", "platform": "cpu"}
    return EngineInfo(**{**facts, "python": "/v/python", "plugin": __version__, **changes})


def test_the_plugin_beside_vllm_is_named_with_its_version():
    assert doctor._plugin(beside()) == doctor.Check(
        "plugin", True, f"kvtune {__version__}, which vLLM's servers load"
    )


@pytest.mark.parametrize(("plugin", "why"), [(None, "not installed"), ("0.0.1", "kvtune 0.0.1")])
def test_a_vllm_without_our_plugin_is_no_fault_and_has_the_fix(plugin, why):
    check = doctor._plugin(beside(plugin=plugin))
    assert check.ok is None
    assert why in check.found
    assert check.fix == f"/v/python -m pip install kvtune=={__version__}"
