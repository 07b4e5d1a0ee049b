"""Which study `kvtune search` opens, and what it refuses, without measuring anything."""

import json
import shlex
import sys

import pytest

from kvtune import __version__
from kvtune.autotune.cli.search import search
from kvtune.autotune.study import open_study
from kvtune.errors import BadInput

SIMULATED = f"{shlex.quote(sys.executable)} -P -m kvtune.engines.simulated.server {{args}}"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plan a search, and return the study that it opened."""
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    workload = tmp_path / "requests.jsonl"
    lines = [{"prompt": f"prompt {number}", "output_tokens": 4} for number in range(8)]
    workload.write_text("".join(json.dumps(line) + "\n" for line in lines))

    opened = []

    def note(*args, **facts):
        opened.append(open_study(*args, **facts))
        return opened[-1]

    monkeypatch.setattr("kvtune.autotune.study.open_study", note)

    def plan(**asked):
        asked = {"engine": "simulated", **asked}
        store = str(tmp_path / "kvtune.db")
        search("org/model", str(workload), dry_run=True, concurrency=2, store=store, **asked)
        return opened[-1]

    return plan


def test_another_command_is_another_study_and_its_server_tells_what_it_is(plan):
    first = plan(engine="vllm", engine_command=SIMULATED)
    assert first.engine.version == __version__
    assert first.settings["server"]["command"] == SIMULATED
    assert first.settings["environment"] == {}
    assert plan(engine="vllm", engine_command=SIMULATED).id == first.id
    other = plan(engine="vllm", engine_command=f"{SIMULATED} --simulate-step-s 0.01")
    assert other.id != first.id


def test_the_environment_that_shapes_results_is_part_of_a_study(plan, monkeypatch):
    first = plan()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    second = plan()
    assert second.id != first.id
    assert second.settings["environment"]["OMP_NUM_THREADS"] == "3"
    assert second.settings["server"]["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in second.settings["environment"]
    assert "sk-1" not in json.dumps(second.settings)


def test_memory_that_a_variable_overrides_is_refused_before_anything_starts(plan, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(BadInput, match="overrides --kv-cache-memory-bytes"):
        plan(kv_memory="64MiB")


def test_a_secret_in_the_command_is_refused_before_it_is_stored(plan):
    with pytest.raises(BadInput, match="holds the value of HF_TOKEN"):
        plan(engine="vllm", engine_command=f"env HF_TOKEN=hf_1 {SIMULATED}")
