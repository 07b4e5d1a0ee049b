"""Caches of several engines behind one address, as ranks of a server or as servers of a gateway."""

from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.cache_info import SIZES, cache_labels, in_common
from kvtune.engines.vllm.effective import read_effective
from kvtune.types import EffectiveConfig


def info(blocks="912", **labels):
    labels = {"block_size": "16", "num_gpu_blocks": blocks, "engine": "0", **labels}
    said = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{said}}} 1.0\n"


def running(model="m", **labels):
    labels = {"engine": "0", "model_name": model, **labels}
    said = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:num_requests_running{{{said}}} 0.0\n"


def read(page, server_info=None, model="m"):
    return read_effective(
        server_info=server_info,
        metrics_text=page,
        log_text="",
        version=None,
        start_kind="attached",
        model=model,
    )


def test_ranks_of_one_server_share_the_blocks_that_each_line_tells():
    """vLLM adds up `num_gpu_blocks` over its engines, and prints the sum for each of them."""
    effective = read(info("1824", engine="0") + info("1824", engine="1"))
    assert (effective.num_gpu_blocks, effective.kv_cache_size_tokens) == (912, 14_592)
    assert effective.differs is None


def test_the_size_that_a_server_tells_is_that_of_one_engine():
    lines = [info("1824", engine=rank, kv_cache_size_tokens="14000") for rank in "01"]
    assert read("".join(lines)).kv_cache_size_tokens == 14_000


def test_of_servers_with_unlike_caches_the_smallest_counts_and_it_is_said():
    page = info("912", pod="a") + info("700", pod="b") + info("912", pod="c")
    effective = read(page)
    assert (effective.num_gpu_blocks, effective.kv_cache_size_tokens) == (700, 11_200)
    assert effective.block_size_tokens == 16
    assert effective.differs == (
        "kv_cache_size_tokens (11200, 14592)",
        "num_gpu_blocks (700, 912)",
    )


def test_a_setting_in_which_servers_differ_is_unknown():
    page = info("912", pod="a", cache_dtype="auto") + info("912", pod="b", cache_dtype="fp8")
    effective = read(page)
    assert (effective.kv_cache_dtype, effective.num_gpu_blocks) == (None, 912)
    assert effective.differs == ("kv_cache_dtype (auto, fp8)",)


def test_what_only_some_servers_say_is_no_setting_of_all():
    effective = read(info(pod="a", enable_prefix_caching="True") + info(pod="b"))
    assert effective.enable_prefix_caching is None
    assert effective.differs == ("enable_prefix_caching (True, unknown)",)


def test_engines_of_other_models_are_left_out():
    page = running(pod="a") + running("other", pod="b") + running(pod="c")
    page += info("700", pod="b") + info("912", pod="a") + info("912", pod="c")
    assert read(page).num_gpu_blocks == 912
    assert read(page).differs is None
    assert read(page, model="other").num_gpu_blocks == 700
    # A gateway may call the model otherwise, so that nobody knows which ones are meant.
    assert len(cache_labels(page, "a name of the gateway's own")) == 3
    assert len(cache_labels(page)) == 3


def test_ranks_count_for_their_own_server_only():
    page = running(pod="a") + running(pod="b", engine="1") + running(pod="b")
    page += info("912", pod="a") + info("1824", pod="b") + info("1824", pod="b", engine="1")
    effective = read(page)
    assert (effective.num_gpu_blocks, effective.differs) == (912, None)


def test_where_there_are_several_engines_the_process_before_them_does_not_speak_for_one():
    config = {
        "cache_config": {"num_gpu_blocks": 1824, "block_size": 16},
        "scheduler_config": {"max_num_seqs": 64},
    }
    page = info("1824", engine="0") + info("1824", engine="1")
    effective = read(page, {"vllm_config": config})
    assert (effective.num_gpu_blocks, effective.max_num_seqs) == (912, 64)
    assert effective.source == ("server_info", "metrics")
    alone = read(info("1824"), {"vllm_config": config})
    assert alone.num_gpu_blocks == 1824


def test_a_line_printed_twice_is_one_engine():
    assert read(info() + info()).num_gpu_blocks == 912


caches = st.fixed_dictionaries(
    {},
    optional={
        "num_gpu_blocks": st.integers(1, 3),
        "kv_cache_size_tokens": st.integers(1, 3),
        "block_size_tokens": st.sampled_from([16, 32]),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
    },
)


@given(st.lists(caches, min_size=1, max_size=4))
def test_the_order_of_engines_does_not_matter(engines):
    assert in_common(engines) == in_common(engines[::-1])


@given(caches, st.integers(1, 4))
def test_like_engines_have_everything_in_common(cache, count):
    assert in_common([cache] * count) == (cache, ())


@given(st.lists(caches, min_size=1, max_size=4))
def test_what_holds_of_all_is_no_more_than_any_engine_says(engines):
    common, differing = in_common(engines)
    for field, value in common.items():
        told = [engine[field] for engine in engines if field in engine]
        assert value in told
        if field in SIZES:
            assert value == min(told)
        else:
            assert told == [value] * len(engines)
    said = {entry.partition(" ")[0] for entry in differing}
    assert set(common) | said == {field for engine in engines for field in engine}


def test_sizes_are_fields_of_a_configuration():
    assert set(EffectiveConfig.model_fields) >= SIZES
