import pytest
from contracts.policy_samples import GIB, on_cpu, on_gpu

from kvtune.errors import BadInput
from kvtune.policies.plugin_arguments import EVICTION_SHARE, QUEST_TOKENS, WINDOW_TOKENS
from kvtune.policies.plugin_clashes import Beside
from kvtune.policies.plugin_config import PluginConfig
from kvtune.policies.settings import base_settings, read_count, settings_of
from kvtune.types import Device, EffectiveConfig


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (2048, 2048),
        ("2048", 2048),
        ("2k", 2000),
        ("2K", 2048),
        ("25.6k", 25_600),
        ("512M", 512 << 20),
        ("1g", 10**9),
        (" 4 ", 4),
        (0, 0),
        (-1, None),
        ("-1", None),
        ("auto", None),
        ("4Gi", None),
        (True, None),
        (2.5, None),
        (None, None),
    ],
)
def test_counts_are_read_as_vllm_reads_them(value, count):
    assert read_count(value) == count


# vLLM's defaults for its API server, by device.
@pytest.mark.parametrize(
    ("name", "memory_gib", "block", "seqs", "budget"),
    [
        ("NVIDIA L4", 24, 16, 256, 2048),
        ("NVIDIA A100-SXM4-80GB", 80, 16, 256, 2048),
        ("NVIDIA H100 80GB HBM3", 80, 16, 1024, 8192),
        ("NVIDIA B200", 180, 16, 1024, 16384),
    ],
)
def test_stock_settings_follow_the_gpu(name, memory_gib, block, seqs, budget):
    device = Device(kind="cuda", name=name, count=1, memory_bytes=memory_gib * GIB)
    now = base_settings(on_gpu(device=device))
    assert (now.block_tokens, now.max_num_seqs, now.max_num_batched_tokens) == (block, seqs, budget)


def test_stock_settings_of_a_cpu_grow_with_its_ranks():
    now = base_settings(on_cpu())
    assert (now.block_tokens, now.max_num_seqs, now.max_num_batched_tokens) == (128, 128, 2048)
    now = base_settings(on_cpu(base_arguments={"tensor-parallel-size": 2}))
    assert (now.max_num_seqs, now.max_num_batched_tokens) == (256, 4096)


def test_what_the_baseline_says_comes_before_the_table_and_after_the_user():
    seen = EffectiveConfig(
        block_size_tokens=64, max_num_seqs=48, max_num_batched_tokens=4096, max_model_len_tokens=900
    )
    ctx = on_cpu(baseline=seen, base_arguments={"max-num-seqs": "8"})
    now = base_settings(ctx)
    assert (now.block_tokens, now.max_num_seqs) == (64, 8)
    assert now.max_model_len_tokens == 900


def test_the_stock_budget_is_at_most_what_a_full_batch_holds():
    now = settings_of({"max-num-seqs": 2, "max-model-len": 512}, on_cpu())
    assert now.max_num_batched_tokens == 1024


def test_without_chunks_the_stock_budget_holds_the_longest_prompt():
    arguments = {"enable-chunked-prefill": False, "max-model-len": 5000}
    assert settings_of(arguments, on_cpu()).max_num_batched_tokens == 5000


def test_the_stock_width_gives_way_to_a_small_budget_but_a_fixed_one_does_not():
    assert settings_of({"max-num-batched-tokens": 64}, on_cpu()).max_num_seqs == 64
    arguments = {"max-num-batched-tokens": 64, "max-num-seqs": 100}
    assert settings_of(arguments, on_cpu()).max_num_seqs == 100


def test_a_length_chosen_by_the_engine_is_read_from_the_baseline():
    seen = EffectiveConfig(max_model_len_tokens=2688)
    ctx = on_cpu(baseline=seen, base_arguments={"max-model-len": "auto"})
    assert base_settings(ctx).max_model_len_tokens == 2688
    assert base_settings(on_cpu()).max_model_len_tokens == 8192
    assert base_settings(on_cpu(model=None)).max_model_len_tokens is None


def test_prefix_caching_is_on_unless_somebody_turned_it_off():
    assert base_settings(on_cpu()).prefix_caching
    assert not base_settings(
        on_cpu(baseline=EffectiveConfig(enable_prefix_caching=False))
    ).prefix_caching
    assert not settings_of({"enable-prefix-caching": False}, on_cpu()).prefix_caching


def test_what_is_in_flight_is_a_batch_on_a_cpu_and_two_where_the_next_is_planned_meanwhile():
    budget = {"max-num-batched-tokens": 512}
    assert settings_of(budget, on_cpu()).in_flight_tokens == 512
    assert settings_of(budget, on_gpu()).in_flight_tokens == 1024
    assert settings_of({**budget, "async-scheduling": False}, on_gpu()).in_flight_tokens == 512


def test_a_request_holds_a_block_for_each_started_one_unless_the_plugin_frees_some():
    stock = settings_of({"block-size": 128}, on_cpu())
    assert stock.sink_window is None
    assert [stock.blocks_of(tokens) for tokens in (1, 128, 129, 8192)] == [1, 1, 2, 64]
    kept = settings_of(
        {"block-size": 128, "max-num-batched-tokens": 256, WINDOW_TOKENS: 1024}, on_cpu()
    )
    # A page of sinks, eight of the window, two of a step, and one more.
    assert [kept.blocks_of(tokens) for tokens in (1, 1280, 1537, 8192)] == [1, 10, 12, 12]


def test_settings_say_what_stays_of_a_prompt_and_what_the_plugin_has_to_go_with():
    now = settings_of({"block-size": 32, EVICTION_SHARE: 0.25, "kv-cache-dtype": "fp8"}, on_cpu())
    assert (now.page_budget.share, now.page_budget.block_tokens) == (0.25, 32)
    assert settings_of({}, on_cpu()).page_budget is None
    assert now.beside == Beside(now.plugin, "fp8")
    other = settings_of(
        {
            "enable-prefix-caching": False,
            "prefix-caching-hash-algo": "xxhash",
            "kv-cache-dtype-skip-layers": ["0"],
        },
        on_cpu(),
    )
    assert other.beside == Beside(PluginConfig(), "auto", False, "xxhash", True)


def test_a_request_that_the_plugin_does_not_know_is_refused():
    with pytest.raises(BadInput, match="quest"):
        settings_of({QUEST_TOKENS: 0}, on_cpu())
