import json

import pytest

from kvtune.autotune.profiling import Subject, observed_concurrency, profile_of
from kvtune.types import Device, EffectiveConfig, Goal, LoadRun, RequestRecord

GPUS = Device(kind="cuda", name="a GPU", count=4, memory_bytes=80 << 30)
CORES = Device(kind="cpu", name="a CPU", count=4, memory_bytes=None)
COUNTERS = {
    "vllm:iteration_tokens_total_count": 1000.0,
    "vllm:iteration_tokens_total_sum": 8000.0,
    "vllm:generation_tokens_total": 8000.0,
    "vllm:request_prompt_tokens_sum": 8000.0,
    "vllm:request_prompt_tokens_count": 10.0,
    "vllm:request_generation_tokens_sum": 4000.0,
    "vllm:request_generation_tokens_count": 10.0,
}
# 8 sequences a step, each of 800 + 400 / 2 tokens
STEP_TOKENS = 8 * 1000


@pytest.fixture
def checkpoint(tmp_path):
    """1 MiB of weights; a token takes 2 layers x 4 heads x 16 numbers x key and value."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "max_position_embeddings": 2048,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"w" * (1 << 20))
    return str(tmp_path)


def kv_to_weights(model, **known):
    """How many bytes of KV a step reads for each byte of weights; `None` if it is not known."""
    run = LoadRun((), 60.0, 0.0, COUNTERS, {})
    profile = profile_of(Subject(model, "", **known), run, Goal(), is_load_ours=False)
    rows = {row.metric: row.value for row in profile.verdict.evidence}
    kv, weights = rows["modelled_kv_reads_share"], rows["modelled_weight_reads_share"]
    return None if kv is None or weights is None else kv / weights


@pytest.mark.parametrize(("dtype", "token_bytes"), [("auto", 512), ("fp8", 256), ("fp8_e5m2", 256)])
def test_kv_is_counted_in_the_format_that_the_server_reports(dtype, token_bytes, checkpoint):
    effective = EffectiveConfig(kv_cache_dtype=dtype, model_dtype="bfloat16")
    found = kv_to_weights(checkpoint, effective=effective)
    assert found == pytest.approx(STEP_TOKENS * token_bytes / (1 << 20))


def test_weights_and_kv_are_both_those_of_one_device(checkpoint):
    alone = kv_to_weights(checkpoint, arguments={}, device=GPUS)
    parallel = kv_to_weights(checkpoint, arguments={"tensor-parallel-size": 4}, device=GPUS)
    assert alone == pytest.approx(parallel)
    reported = EffectiveConfig(
        kv_cache_memory_bytes=1280 * 128, num_gpu_blocks=10, block_size_tokens=128
    )
    pipeline = kv_to_weights(
        checkpoint, arguments={"pipeline-parallel-size": 2}, device=GPUS, effective=reported
    )
    assert pipeline == pytest.approx(STEP_TOKENS * 128 / (1 << 19)), "as the server reports it"


def test_how_many_devices_share_a_model_is_not_guessed(checkpoint):
    assert kv_to_weights(checkpoint, device=GPUS) is None
    assert kv_to_weights(checkpoint, device=CORES) is not None, "cores share one memory"
    assert kv_to_weights(None, served_name=checkpoint) is None, "nobody named that directory"


def test_what_is_off_about_a_run_is_said_in_its_profile():
    short = RequestRecord(0, 0.0, 0.0, 0.1, 1.0, (0.1,), 8, 2, 4)
    run = LoadRun((short,), 60.0, 0.0, {}, {}, ("late",))
    profile = profile_of(Subject("m", ""), run, Goal(), is_load_ours=True)
    assert profile.warnings == ("late", "1 requests returned fewer tokens than were asked for")


def test_observed_concurrency_is_the_most_requests_at_once():
    times = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6)]
    records = tuple(
        RequestRecord(index, sent, sent, sent, end, (), 1, 1, 1)
        for index, (sent, end) in enumerate(times)
    )
    assert observed_concurrency(LoadRun(records, 4.0, 0.0, {}, {})) == 3
