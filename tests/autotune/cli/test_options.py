import json

import pytest

from kvtune.autotune.cli.options import base_arguments, make_plan, read_workload
from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, OpenLoop


@pytest.mark.parametrize("text", ["--api-key sk-1", "--hf-token=hf_1 --max-model-len 64"])
def test_a_secret_in_engine_args_is_refused(text):
    with pytest.raises(BadInput, match="is a secret"):
        base_arguments(text, None)


def test_kv_memory_is_an_engine_argument_that_is_given_once():
    assert base_arguments("--max-model-len 64", "64MiB") == {
        "max-model-len": 64,
        "kv-cache-memory-bytes": 64 << 20,
    }
    with pytest.raises(BadInput, match="given twice"):
        base_arguments("--kv-cache-memory-bytes 1G", "64MiB")


TIMED = '{"prompt": "a", "output_tokens": 1, "arrival_s": %d}\n'


@pytest.fixture
def workload(tmp_path):
    """Reads lines as a workload file."""

    def read(*lines):
        file = tmp_path / "requests.jsonl"
        file.write_text("".join(line if line.endswith("\n") else line + "\n" for line in lines))
        return read_workload(str(file), format=None, limit=None)

    return read


def plan_of(workload, *, model=None, concurrency=None, time_scale=1.0):
    return make_plan(
        workload,
        model=model,
        concurrency=concurrency,
        time_scale=time_scale,
        natural_stop=False,
        output_tokens=8,
    )


def test_a_time_scale_that_would_scale_nothing_is_refused(workload):
    timed = workload(TIMED % 0, TIMED % 1)
    assert plan_of(timed, time_scale=0.5).arrivals == OpenLoop(time_scale=0.5)
    assert plan_of(timed, concurrency=3).arrivals == ClosedLoop(3)
    with pytest.raises(BadInput, match="--concurrency keeps a closed loop"):
        plan_of(timed, concurrency=3, time_scale=0.5)
    untimed = workload('{"prompt": "a"}')
    with pytest.raises(BadInput, match="has no arrival times"):
        plan_of(untimed, time_scale=0.5)


def test_a_plan_says_when_it_does_not_know_the_vocabulary(workload, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "max_position_embeddings": 64,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lengths = workload('{"input_tokens": 8}')
    assert plan_of(lengths, model=str(tmp_path)).vocab_size == 500
    assert plan_of(lengths, model=str(tmp_path)).warnings == ()
    unknown = plan_of(lengths, model="org/name")
    assert unknown.vocab_size == 30_000
    assert "30,000" in unknown.warnings[0]
    assert plan_of(workload('{"prompt": "a"}'), model="org/name").warnings == ()


def test_records_that_are_no_requests_are_counted_on_stderr(tmp_path, capsys):
    file = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    assert len(read_workload(str(file), format="sharegpt", limit=None).requests) == 1
    assert f"warning: {file}: 1 records skipped: " in capsys.readouterr().err
