"""`kvtune doctor`: what is usable, and the fix for what is not."""

import json

import pytest

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
