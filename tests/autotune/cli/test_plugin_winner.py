"""A policy of the plugin that wins a search is in what is emitted, with what to install."""

import json

import pytest
import yaml
from contracts.emitter import prose
from contracts.landscape import ONLY_BLOCK_SIZE
from contracts.policy_samples import WITH_PLUGIN

from kvtune import __version__
from kvtune.autotune.emit.base import emitters
from kvtune.autotune.limits import Budget
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.policies.plugin_arguments import STORE_FORMAT
from kvtune.types import Harm, Outcome

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
ONLY_STORE = {
    **ONLY_BLOCK_SIZE,
    "block-size": 32,
    "kv-cache-dtype": "auto",
    "kv-cache-memory-bytes": 64 << 20,
    "max-model-len": 2048,
}
"""Base arguments that leave a search the stock pages and int8 ones."""


class Beside(SimulatedEngine):
    """Tells of itself what a vLLM does that has the plugin beside it."""

    def describe(self):
        return WITH_PLUGIN

    def check_arguments(self, arguments, model):
        return ()


@pytest.fixture
def won(tuning_on, landscape, tmp_path, monkeypatch):
    """A search that int8 pages won."""
    # Nothing here asks what this machine reaches, which takes seconds to measure.
    monkeypatch.setattr("kvtune.autotune.baseline.device_ceilings", lambda *_: None)
    landscape.goodput = lambda arguments: 3.0 if STORE_FORMAT in arguments else 1.0
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    tuning = tuning_on(
        engine=Beside(),
        model=str(model),
        base=ONLY_STORE,
        max_harm=Harm.NEAR_LOSSLESS,
        explore_lossy=True,
        budget=Budget(trials=3, finalists=1, confirm_rounds=2),
    )
    decision = tuning.run()
    assert (decision.outcome, decision.recommended) == (Outcome.WINNER, 1)


def test_what_is_emitted_asks_for_the_policy_and_says_what_to_install(won, kvtune, tmp_path):
    out = tmp_path / "out"
    store = ("--store", tmp_path / "kvtune.db")
    kvtune("emit", *store, "--format", "all", "--no-check", "-o", out)
    asked = yaml.safe_load((out / "vllm.yaml").read_text())
    assert asked[STORE_FORMAT] == "int8"
    files = [path for path in out.iterdir() if path.name != "kvtune-manifest.json"]
    assert len(files) == len(emitters())
    for path in files:
        text = path.read_text()
        assert STORE_FORMAT in text, path.name
        assert f"pip install kvtune=={__version__}" in prose({path.name: text})
        assert "kvtune.engines.vllm.plugin" in text, "nothing checks that it is there"
