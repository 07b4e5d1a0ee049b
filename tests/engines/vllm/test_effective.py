"""What vLLM 0.32.0 says of itself: trimmed answers and log lines of a real server."""

import pytest

from kvtune.engines.vllm.effective import differences, read_effective, unread
from kvtune.types import EffectiveConfig

SERVER_INFO = {
    "vllm_config": {
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 2048, "enforce_eager": True},
        "cache_config": {
            "block_size": 128,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
            "num_gpu_blocks": 91,
            "kv_cache_size_tokens": 11648,
            "kv_cache_max_concurrency": 5.6875,
            "kv_cache_memory_bytes": 268435456,
        },
        "scheduler_config": {
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 128,
            "max_num_active_seqs": None,
            "long_prefill_token_threshold": 0,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
        },
        "attention_config": {"backend": "FLASH_ATTN"},
    }
}
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",\
enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.92",hash_block_size="None",\
kv_cache_max_concurrency="5.6875",kv_cache_memory_bytes="268435456",kv_cache_size_tokens="11648",\
num_gpu_blocks="91",num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""
LOG = """\
(EngineCore pid=1) INFO 11-29 17:15:08 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with \
config: model='/m', tokenizer='/m', dtype=torch.bfloat16, max_seq_len=2048, enforce_eager=True, \
kv_cache_dtype=auto, device_config=cpu
(EngineCore pid=1) INFO 11-29 17:15:09 [utils.py:347] Using LBHNC KV cache layout.
(EngineCore pid=1) INFO 11-29 17:15:09 [kv_cache_utils.py:2327] CPU KV cache size: 11,648 tokens
"""


def read(server_info=None, metrics="", log="", version=None):
    return read_effective(
        server_info=server_info,
        metrics_text=metrics,
        log_text=log,
        version=version,
        start_kind="cold",
    )


def test_server_info_gives_the_whole_configuration():
    assert read(SERVER_INFO, METRICS, LOG, "0.32.0") == EffectiveConfig(
        kv_cache_size_tokens=11648,
        num_gpu_blocks=91,
        block_size_tokens=128,
        kv_cache_max_concurrency=5.6875,
        kv_cache_memory_bytes=268435456,
        kv_cache_dtype="auto",
        model_dtype="bfloat16",
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256",
        max_model_len_tokens=2048,
        max_num_seqs=128,
        max_num_active_seqs=None,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold_tokens=0,
        watermark_ratio=0.0,
        scheduler_reserve_full_isl=True,
        attention_backend=None,
        enforce_eager=True,
        engine_version="0.32.0",
        start_kind="cold",
        source=("server_info", "log"),
    )


def test_bytes_that_the_pool_does_not_have_are_not_read():
    """Whatever the number of blocks is: they were not counted from the bytes that vLLM tells."""
    cache = {**SERVER_INFO["vllm_config"]["cache_config"], "num_gpu_blocks_override": 96}
    info = {"vllm_config": {**SERVER_INFO["vllm_config"], "cache_config": cache}}
    page = METRICS.replace('num_gpu_blocks_override="None"', 'num_gpu_blocks_override="96"')
    for effective in (read(info, page), read(None, page)):
        assert effective.kv_cache_memory_bytes is None
        assert effective.num_gpu_blocks == 91


def test_without_server_info_metrics_and_log_are_read():
    effective = read(None, METRICS, LOG)
    assert effective.source == ("metrics", "log")
    assert effective.num_gpu_blocks == 91
    assert effective.kv_cache_size_tokens == 11648
    assert effective.enable_prefix_caching is True
    assert effective.kv_cache_max_concurrency == 5.6875
    assert (effective.model_dtype, effective.max_model_len_tokens) == ("bfloat16", 2048)
    assert effective.engine_version == "0.32.0"
    # Neither place says it, so it is unknown and not the default.
    assert effective.max_num_seqs is None


def test_a_server_that_says_nothing_is_unknown_and_not_assumed():
    assert read() == EffectiveConfig(start_kind="cold", source=())


@pytest.mark.parametrize(
    "line",
    [
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        "Using FLASH_ATTN backend.",
    ],
)
def test_the_attention_backend_is_what_the_log_says_is_used(line):
    log = f"(EngineCore pid=1) INFO 11-29 17:15:08 [cuda.py:507] {line}\n"
    assert read(log=log).attention_backend == "FLASH_ATTN"
    # The configuration repeats the flag, which the CPU platform ignores.
    assert read(SERVER_INFO, log=LOG).attention_backend is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv-cache-memory-bytes": "256M", "max-model-len": "2048", "block-size": 128},
        {"enable-prefix-caching": True, "enforce_eager": True, "watermark": 0},
        {"max-model-len": "auto", "kv-cache-dtype": "auto", "max-num-active-seqs": None},
        {"some-option-that-is-not-read-back": 3},
    ],
)
def test_arguments_that_read_back_as_passed_raise_no_warning(arguments):
    assert differences(arguments, read(SERVER_INFO, METRICS, LOG), LOG) == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max-num-seqs": 64}, "--max-num-seqs was passed as 64, but the engine runs with 128"),
        ({"kv-cache-memory-bytes": "256m"}, "'256m', but the engine runs with 268435456"),
        ({"enable-prefix-caching": False}, "passed as False, but the engine runs with True"),
        ({"kv-cache-dtype": "fp8"}, "passed as 'fp8', but the engine runs with 'auto'"),
    ],
)
def test_an_argument_that_the_engine_did_not_take_raises_a_warning(arguments, said):
    (warning,) = differences(arguments, read(SERVER_INFO, METRICS, LOG), LOG)
    assert said in warning


def test_arguments_whose_effect_was_not_read_back_are_named_as_vllm_names_them():
    arguments = {"block_size": 16, "watermark": 0.1, "max_num_partial_prefills": 2}
    told = EffectiveConfig(block_size_tokens=32)
    assert unread(arguments, told) == {"watermark": 0.1, "max-num-partial-prefills": 2}
    assert unread(arguments, EffectiveConfig()).keys() >= {"block-size"}


def test_an_attention_backend_that_is_ignored_on_cpu_raises_a_warning():
    log = "INFO 11-29 [cpu.py:178] Cannot use AttentionBackendEnum.FLASH_ATTN backend on CPU."
    effective = read(SERVER_INFO, log=log)
    (warning,) = differences({"attention-backend": "FLASH_ATTN"}, effective, log)
    assert "does not use the attention backend FLASH_ATTN" in warning


@pytest.mark.parametrize(
    ("labels", "expected"),
    [('block_size="16.0"', 16), ('block_size="many"', None), ('block_size=""', None)],
)
def test_a_label_that_cannot_be_read_is_unknown(labels, expected):
    effective = read(metrics=f'vllm:cache_config_info{{{labels},num_gpu_blocks="91"}} 1.0\n')
    assert effective.block_size_tokens == expected
    assert effective.num_gpu_blocks == 91


def test_a_configuration_of_another_shape_is_unknown():
    odd = {"cache_config": "text", "scheduler_config": {"max_num_seqs": [1], "watermark": 0.5}}
    effective = read({"vllm_config": odd}, metrics=METRICS, version=32)
    assert (effective.max_num_seqs, effective.engine_version) == (None, None)
    assert (effective.watermark_ratio, effective.block_size_tokens) == (0.5, 128)
    assert effective.source == ("server_info", "metrics")


@pytest.mark.parametrize(
    ("labels", "size_tokens"),
    [
        ('block_size="16",num_gpu_blocks="912",sliding_window="None"', 14_592),
        ('block_size="16",num_gpu_blocks="912"', 14_592),
        ('block_size="16",num_gpu_blocks="912",kv_cache_size_tokens="14000"', 14_000),
        ('block_size="16",num_gpu_blocks="912",sliding_window="4096"', None),
        ('block_size="16",num_gpu_blocks="912",mamba_page_size_padded="65536"', None),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('num_gpu_blocks="912"', None),
    ],
)
def test_what_the_blocks_hold_is_known_of_releases_that_do_not_say_it(labels, size_tokens):
    effective = read_effective(
        server_info=None,
        metrics_text=f"vllm:cache_config_info{{{labels}}} 1.0\n",
        log_text="",
        version=None,
        start_kind="attached",
    )
    assert effective.kv_cache_size_tokens == size_tokens


PLUGIN_PAGE = r"""# HELP kvtune:info What the plugin was asked to do, as labels.
# TYPE kvtune:info gauge
kvtune:info{config="{\"protect\": {\"prefix_tokens\": 0}, \"quest\": {\"dense_layers\": 2, \
\"pages\": 8, \"per_kv_head\": false}, \"schema_version\": 1}",engine="0",fingerprint="abc",\
kvtune="0.1.0",model_name="m",policies="quest",vllm="0.32.0"} 1.0
""".replace("\\\n", "")
PLUGIN = {
    "protect": {"prefix_tokens": 0},
    "quest": {"dense_layers": 2, "pages": 8, "per_kv_head": False},
    "schema_version": 1,
}
ASKED = {"additional-config.kvtune.quest.pages": 8}


def test_what_the_plugin_does_is_what_it_says_and_not_what_was_asked():
    assert read(None, METRICS + PLUGIN_PAGE).plugin == PLUGIN
    info = {"vllm_config": {**SERVER_INFO["vllm_config"], "additional_config": {"kvtune": {}}}}
    assert read(info, METRICS).plugin is None
    assert read(None, METRICS + PLUGIN_PAGE.replace("{", "[", 2)).plugin is None


def test_a_plugin_that_is_silent_or_does_something_else_is_a_warning():
    does = read(None, METRICS + PLUGIN_PAGE)
    assert differences(ASKED, does, "") == ()
    assert differences({"additional_config": {"kvtune": {"quest": {"pages": 8}}}}, does, "") == ()
    (silent,) = differences(ASKED, read(None, METRICS), "")
    assert '"pages": 8' in silent
    assert silent.endswith("but is silent")
    (other,) = differences({"additional-config.kvtune.quest.pages": 9}, does, "")
    assert other.startswith(
        'kvtune\'s plugin was asked for {"schema_version": 1, "quest": {"pages"'
    )
    assert "but does {" in other


def test_what_the_plugin_does_stands_for_the_arguments_that_asked_for_it():
    does = read(None, METRICS + PLUGIN_PAGE)
    whole = {"additional-config": {"kvtune": {"quest": {"pages": 8}}}}
    assert unread(ASKED, does) == unread(whole, does) == {}
    others = {"additional-config": {"kvtune": {"quest": {"pages": 8}}, "other": 1}}
    assert unread(others, does) == others
    assert unread(ASKED, EffectiveConfig()) == ASKED
