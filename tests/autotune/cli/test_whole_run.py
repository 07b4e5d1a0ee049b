"""A whole search leaves a page on which its way to the decision can be read from end to end."""

import json

import pytest
from contracts.pages import Parsed

pytestmark = pytest.mark.integration

LEVERS = (
    "--max-model-len 2048 --simulate-time-scale 0.05 --enable-prefix-caching "
    "--prefix-caching-hash-algo sha256 --max-num-seqs 64 --max-num-active-seqs 64 "
    "--max-num-batched-tokens 2048 --scheduler-reserve-full-isl --watermark 0.0"
)
"""Block sizes and the format of KV are left to search."""


def test_the_report_of_a_study_has_the_whole_way_to_its_decision(kvtune, tmp_path):
    workload = tmp_path / "w.jsonl"
    lengths = ("--input-tokens", "uniform:16-32", "--output-tokens", "uniform:24-32")
    shared = ("--shared-prefixes", "2", "--prefix-tokens", "608")
    kvtune("workload", "make", "--requests", "40", *shared, *lengths, "-o", workload)
    search = (
        *("search", "--engine", "simulated", "--model", "org/tiny", "--concurrency", "16"),
        *("--kv-memory", "64MiB", "--goal", "p95 ttft <= 2s", "--engine-args", LEVERS),
        *("--workload", workload, "--budget", "3", "--finalists", "1"),
        *("--confirm-rounds", "2", "--no-probe", "--explore-lossy", "--no-quality", "--json"),
    )
    kvtune(*search)
    out = tmp_path / "config"
    kvtune("emit", "--format", "vllm-yaml", "-o", out)
    page = tmp_path / "report.html"
    found = kvtune("report", "--json", "-o", page).json()

    says = {}
    for step in found["trail"]:
        says.setdefault(step["kind"], []).append(step["says"])
    assert found["verdict"]["summary"] in says["verdict"][0]
    assert any(text.startswith("L1") and "block_size" in text for text in says["rung"])
    assert any(text.startswith("L2") and "kv_cache_dtype" in text for text in says["rung"])
    assert len(says["unlock"]) == 1
    assert "it was asked for" in says["unlock"][0]
    assert len(says["trial"]) == 3
    assert any("goodput" in text for text in says["forecast"])
    assert "stock" in says["finalists"][0]
    assert len(says["confirm"]) == 4
    decided = says["decide"][0]
    assert all(reason in decided for reason in found["decision"]["reasons"])
    (emitted,) = found["emitted"]
    assert emitted["files"].keys() == {"vllm.yaml"}
    assert emitted["files"]["vllm.yaml"][:12] in says["emit"][0]
    assert (out / "vllm.yaml").is_file()

    shown = [cell for row in Parsed(page.read_text()).rows for cell in row]
    for step in found["trail"]:
        assert any(step["says"] in cell for cell in shown), json.dumps(step)
