"""`kvtune plan`: figures for a config, and clear words when something is missing."""

import json

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LENGTHS = ("--input-tokens", 4000, "--output-tokens", 300)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_json_has_a_row_for_each_stack(kvtune, config):
    stack = "snapkv:budget_tokens=512 + kivi:bits=4"
    words = ("--config", config, "--device", "h100", *LENGTHS, "--stack", stack)
    found = kvtune("plan", *words, "--json").json()
    assert found["device"] == "h100"
    assert found["prompt_tokens"] == 4000
    assert [row["stack"] for row in found["rows"]] == ["full", stack.replace(" + ", " + ")]
    assert found["rows"][0]["bytes_per_token"] == 131072
    (advice,) = found["architectures"].values()
    assert any("MHA (32 KV heads)" in line and "4 times" in line for line in advice)
    assert found["rows"][1]["tokens"] > 4 * found["rows"][0]["tokens"]


def test_text_names_every_method_and_what_the_roof_is(kvtune, config):
    said = kvtune("plan", "--config", config.parent, "--device", "h200", *LENGTHS).out
    for name in ("full", "snapkv", "kivi", "quest", "palu"):
        assert f"\n{name}" in said
    assert "memory bus alone" in " ".join(said.split())
    assert "This model has grouped-query attention:" in said


def test_a_workload_gives_the_lengths(kvtune, config, tmp_path):
    file = tmp_path / "w.jsonl"
    kvtune(
        *("workload", "make", "--requests", "20", "--input-tokens", "100"),
        *("--output-tokens", "50", "-o", file),
    )
    words = ("--config", config, "--device", "h100", "--workload", file)
    found = kvtune("plan", *words, "--stack", "vllm-fp8", "--json").json()
    assert (found["prompt_tokens"], found["output_tokens"]) == (100, 50)


def test_another_device_is_given_by_its_figures(kvtune, config):
    words = ("--config", config, "--memory-gib", 40, "--bandwidth-gb-s", 1000, *LENGTHS)
    found = kvtune("plan", *words, "--stack", "vllm-fp8", "--json").json()
    assert found["device_source"] == "given"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*LENGTHS,), "no device"),
        (("--device", "h1", *LENGTHS), "unknown device"),
        (("--device", "h100"), "length"),
        (("--device", "h100", *LENGTHS, "--stack", "snap"), "unknown method"),
        (("--device", "h100", *LENGTHS, "--stack", "kivi:bit=4"), "parameters of kivi"),
        (("--device", "l4", *LENGTHS, "--weight-gib", 30), "leave no memory"),
    ],
)
def test_what_is_missing_or_wrong_is_said(kvtune, config, words, says):
    assert says in kvtune("plan", "--config", config, *words, code=2).err


def test_an_unknown_architecture_is_refused(kvtune, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "architectures": ["NewForCausalLM"]}))
    said = kvtune("plan", "--config", file, "--device", "h100", *LENGTHS, code=2).err
    assert "NewForCausalLM" in said
