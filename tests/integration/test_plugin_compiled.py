"""In a model that vLLM compiles, policies do what they do in one that it runs op by op."""

import shutil
from pathlib import Path

import pytest
from contracts.answers import assert_same
from verdict_models import cut_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

QUEST = {"quest": {"pages": 2, "dense_layers": 1}}
TOGETHER = QUEST | {
    "streaming_llm": {"window_tokens": 96, "sink_tokens": 4},
    "store": {"format": "int8"},
}
EVICTION = {"page_eviction": {"budget_tokens": 128}}
PROMPTS = [
    [(position * 7919 + seed) % 40_000 + 100 for position in range(length)]
    for seed, length in enumerate((300, 200, 40))
]


@pytest.fixture(scope="module")
def three_layers(model, tmp_path_factory):
    """A compiler takes as long as there are layers."""
    return cut_model(Path(model), 3, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What is compiled for one policy is the same for another."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("asked", [TOGETHER, EVICTION], ids=["quest-window-int8", "eviction"])
def test_policies_do_in_a_compiled_model_what_they_do_in_another(ask, three_layers, cache, asked):
    eager = ask("compiled_engine", three_layers, asked=asked, prompts=PROMPTS)
    ours = ask("compiled_engine", three_layers, asked=asked, prompts=PROMPTS, cache=cache)
    assert (eager["graphs"], ours["graphs"] > 0) == (0, True)
    assert_same(ours["calls"], eager["calls"])
    assert ours["counted"] == eager["counted"]
    assert ours["evicted"] == eager["evicted"]
    assert ours["counted"]["pages_read"] < ours["counted"]["pages_seen"]
    assert sum(ours["evicted"].values()) > 0
