import json
import subprocess
import sys

import pytest

from kvtune import __version__

pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

# A process that starts one server after another, as a script with several LLM(...) does; vLLM
# itself takes no part but with its version.
PROCESS = """
import pathlib, sys, types
sys.modules["vllm"] = types.SimpleNamespace(__version__="0.32.7")
from kvtune.engines.vllm.plugin import metrics_folder
metrics_folder._MEMORY = pathlib.Path(sys.argv[1])
from kvtune.engines.vllm.plugin.collector import begin
from kvtune.engines.vllm.plugin.counters import counters
from kvtune.policies.plugin_config import plugin_config
import prometheus_client

vllm_config = types.SimpleNamespace(
    model_config=types.SimpleNamespace(served_model_name="some/model")
)
for asked in sys.argv[2:]:
    begin(plugin_config({"kvtune": eval(asked)}), vllm_config)
    counters().add("pages_read", 12)
print(prometheus_client.generate_latest().decode())
"""
VLLM = {"engine": "0", "model_name": "some/model"}
FIRST = {"streaming_llm": {"window_tokens": 64}}
SECOND = {"quest": {"pages": 8}, "protect": {"prefix_tokens": 3}}


def page_after(folder, *asked):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, folder, *map(repr, asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return {
        sample.name: (sample.value, sample.labels)
        for family in parser.text_string_to_metric_families(done.stdout)
        for sample in family.samples
        if sample.name.startswith("kvtune")
    }


def test_a_page_tells_what_is_counted_and_what_was_asked(tmp_path):
    found = page_after(tmp_path, SECOND)
    assert found["kvtune:pages_read_total"] == (12, VLLM)
    value, labels = found["kvtune:info"]
    config = json.loads(labels.pop("config"))
    assert len(labels.pop("fingerprint")) == 16
    assert value == 1
    assert labels == {
        **VLLM,
        "policies": "quest",
        "kvtune": __version__,
        "vllm": "0.32.7",
    }
    assert (config["quest"]["pages"], config["protect"]) == (8, {"prefix_tokens": 3})


def test_all_policies_that_are_asked_are_named(tmp_path):
    both = page_after(tmp_path, FIRST | SECOND)["kvtune:info"][1]["policies"]
    assert both == "quest+streaming_llm"


def test_of_servers_one_after_another_the_latest_is_shown(tmp_path):
    found = page_after(tmp_path, FIRST, SECOND)
    assert found["kvtune:info"][1]["policies"] == "quest"
    assert found["kvtune:pages_read_total"][0] == 12


def test_without_a_request_nothing_is_shown_and_afterwards_nothing_is_left(tmp_path):
    assert page_after(tmp_path) == {}
    page_after(tmp_path, FIRST)
    assert [*tmp_path.iterdir()] == []
