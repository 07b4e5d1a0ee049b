"""What the plugin does to vLLM's scheduler, on a stand-in that has the same attributes."""

import json
import sys
import types
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin import live_changes

STOCK = {
    "max-num-seqs": None,
    "max-num-active-seqs": None,
    "max-num-batched-tokens": None,
    "long-prefill-token-threshold": None,
    "scheduler-reserve-full-isl": None,
    "watermark": None,
}
BLOCKS = 151


class Full:
    """A group whose layers see all of a sequence."""


class Window:
    """A group whose layers see the last tokens only."""


def module(name, **content):
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """The two modules of vLLM that sizes are judged with."""
    platform = SimpleNamespace(is_cpu=lambda: True)
    for made in (
        module("vllm"),
        module("vllm.platforms", current_platform=platform),
        module("vllm.v1"),
        module("vllm.v1.kv_cache_interface", FullAttentionSpec=Full),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return platform


def make_core(**changed):
    """An idle engine, started with 128 sequences and 2,048 tokens in a step."""
    config = SimpleNamespace(
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=0,
        watermark=0.0,
        enable_chunked_prefill=True,
    )
    scheduler = type("Scheduler", (), {"__module__": "vllm.v1.core.sched.async_scheduler"})()
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 128
    scheduler.max_num_scheduled_tokens = 2048
    scheduler.scheduler_reserve_full_isl = True
    scheduler.scheduler_config = config
    scheduler.max_model_len = 2048
    scheduler.connector = scheduler.ec_connector = None
    scheduler.kv_cache_manager = SimpleNamespace(watermark_blocks=0)
    scheduler.kv_cache_config = SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=Full())]
    )
    scheduler.resets = 0

    def reset_prefix_cache():
        scheduler.resets += 1
        return True

    scheduler.reset_prefix_cache = reset_prefix_cache
    scheduler.has_requests = lambda: False
    whole = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        model_config=SimpleNamespace(enforce_eager=True, is_multimodal_model=False),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=48 << 20, num_gpu_blocks_override=None),
        scheduler_config=config,
    )
    core = SimpleNamespace(scheduler=scheduler, vllm_config=whole, batch_queue=None)
    for path, value in changed.items():
        owner = core
        *owners, name = path.split("__")
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return core


def holds(core):
    scheduler = core.scheduler
    return (
        scheduler.max_num_running_reqs,
        scheduler.max_num_active_reqs,
        scheduler.max_num_scheduled_tokens,
        scheduler.scheduler_config.max_num_batched_tokens,
        scheduler.scheduler_config.long_prefill_token_threshold,
        scheduler.scheduler_reserve_full_isl,
        scheduler.kv_cache_manager.watermark_blocks,
    )


def test_everything_that_a_step_reads_is_set_and_read_back():
    core = make_core()
    answer = live_changes.change(
        core,
        {
            "max-num-seqs": 8,
            "max-num-active-seqs": 6,
            "max-num-batched-tokens": 512,
            "long-prefill-token-threshold": 256,
            "scheduler-reserve-full-isl": False,
            "watermark": 0.05,
        },
    )
    # 5% of 151 blocks are 7.55, of which vLLM keeps the whole ones.
    assert holds(core) == (8, 6, 512, 512, 256, False, 7)
    assert answer["set"]["max-num-active-seqs"] == 6
    assert answer["watermark_blocks"] == 7
    assert core.scheduler.resets == 1


def test_what_is_not_asked_for_is_again_as_it_was_started():
    core = make_core(scheduler__scheduler_config__watermark=0.02)
    started = holds(core)
    live_changes.change(core, {**STOCK, "max-num-seqs": 4, "watermark": 0.2})
    live_changes.change(core, STOCK)
    # The stand-in was made with a ratio and without its blocks, which is 3 of 151.
    assert holds(core) == (*started[:-1], 3)


changes = st.fixed_dictionaries(
    {
        "max-num-seqs": st.none() | st.integers(1, 140),
        "max-num-active-seqs": st.none() | st.integers(1, 140),
        "max-num-batched-tokens": st.none() | st.integers(1, 2100),
        "long-prefill-token-threshold": st.none() | st.integers(0, 2100),
        "scheduler-reserve-full-isl": st.none() | st.booleans(),
        "watermark": st.none() | st.floats(0, 1.1),
    }
)


@given(st.lists(changes, max_size=4), changes)
def test_what_holds_depends_on_the_last_change_alone(before, last):
    used, fresh = make_core(), make_core()
    for wanted in before:
        live_changes.change(used, wanted)
    assert live_changes.change(used, last) == live_changes.change(fresh, last)
    if holds(fresh) != holds(make_core()):
        assert holds(used) == holds(fresh)


@given(changes)
def test_nothing_is_set_beyond_what_the_server_has_buffers_for(wanted):
    core = make_core()
    live_changes.change(core, wanted)
    running, active, tokens, budget, *_ = holds(core)
    assert active <= running <= min(128, tokens)
    assert tokens == budget <= 2048


@pytest.mark.parametrize(
    "changed",
    [
        {"scheduler__has_requests": lambda: True},
        {"batch_queue": [object()]},
        {"scheduler__reset_prefix_cache": lambda: False},
    ],
)
def test_an_engine_at_work_is_left_as_it_is(changed):
    core = make_core(**changed)
    assert live_changes.change(core, {**STOCK, "max-num-seqs": 4}) == {"busy": True}
    assert holds(core) == holds(make_core())


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"max-num-seqs": 129}, "started for max-num-seqs of at most 128"),
        ({"max-num-batched-tokens": 4096}, "max-num-batched-tokens of at most 2048"),
        ({"max-num-batched-tokens": 64}, "max-num-batched-tokens is below max-num-seqs"),
        ({"max-num-seqs": 4, "max-num-active-seqs": 5}, "max-num-active-seqs is above"),
        ({"long-prefill-token-threshold": 2049}, "not within 0 and 2048"),
        ({"watermark": 1.0}, "watermark is not within"),
        ({"max-num-seqs": 0}, "below 1"),
    ],
)
def test_what_vllm_would_not_start_so_is_refused(wanted, why):
    core = make_core()
    assert why in live_changes.change(core, {**STOCK, **wanted})["refused"]
    assert (holds(core), core.scheduler.resets) == (holds(make_core()), 0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vllm_config__model_config__enforce_eager": False}, "kernels are compiled"),
        ({"vllm_config__cache_config__kv_cache_memory_bytes": None}, "the KV pool is what"),
        ({"vllm_config__model_config__is_multimodal_model": True}, "encoder"),
        ({"vllm_config__scheduler_config__enable_chunked_prefill": False}, "chunked prefill"),
        (
            {
                "scheduler__kv_cache_config__kv_cache_groups": [
                    SimpleNamespace(kv_cache_spec=Full()),
                    SimpleNamespace(kv_cache_spec=Window()),
                ]
            },
            "layers with a window",
        ),
    ],
)
def test_sizes_that_shape_more_than_buffers_are_refused_and_the_rest_is_not(changed, why):
    core = make_core(**changed)
    assert why in live_changes.change(core, {**STOCK, "max-num-seqs": 8})["refused"]
    assert "set" in live_changes.change(core, {**STOCK, "watermark": 0.1, "max-num-active-seqs": 8})


def test_sizes_are_refused_where_graphs_are_captured(vllm):
    vllm.is_cpu = lambda: False
    refused = live_changes.change(make_core(), {**STOCK, "max-num-batched-tokens": 512})
    assert "graphs are captured" in refused["refused"]


def test_so_few_sequences_that_the_default_budget_would_be_another_are_refused():
    core = make_core(scheduler__max_model_len=256)
    # Seven sequences of 256 tokens have 1,792 at most, and that is what vLLM would take.
    assert (
        "smaller max-num-batched"
        in live_changes.change(core, {**STOCK, "max-num-seqs": 7})["refused"]
    )
    assert "set" in live_changes.change(core, {**STOCK, "max-num-seqs": 8})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vllm_config__speculative_config": object()}, "speculative"),
        ({"scheduler__connector": object()}, "connector"),
        ({"vllm_config__parallel_config__data_parallel_size": 2}, "several engines"),
        ({"scheduler__max_num_scheduled_tokens": 1024}, "budget"),
        ({"scheduler__kv_cache_manager": SimpleNamespace()}, "no watermark_blocks"),
    ],
)
def test_an_engine_that_is_not_known_through_and_through_is_not_touched(changed, why):
    assert why in live_changes.change(make_core(**changed), STOCK)["refused"]


def test_somebody_elses_scheduler_is_not_touched():
    core = make_core()
    type(core.scheduler).__module__ = "their_package.scheduler"
    assert "somebody else's" in live_changes.change(core, STOCK)["refused"]


@pytest.fixture
def engine_class(monkeypatch):
    class EngineCore:
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            return ("workers", method, timeout, args, kwargs)

    core = module("vllm.v1.engine.core", EngineCore=EngineCore)
    for made in (module("vllm.v1.engine"), core):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return EngineCore


def test_without_its_switch_the_plugin_does_nothing(engine_class, monkeypatch):
    monkeypatch.delenv(live_changes.SWITCH, raising=False)
    before = engine_class.collective_rpc
    live_changes.register()
    assert engine_class.collective_rpc is before


def test_other_calls_still_go_to_the_workers(engine_class, monkeypatch):
    monkeypatch.setenv(live_changes.SWITCH, "1")
    live_changes.register()
    once = engine_class.collective_rpc
    live_changes.register()
    assert engine_class.collective_rpc is once
    core = engine_class()
    assert core.collective_rpc("sleep", 3.0, (1,), {"a": 2}) == (
        "workers",
        "sleep",
        3.0,
        (1,),
        {"a": 2},
    )
    vars(core).update(vars(make_core()))
    (answer,) = core.collective_rpc(
        live_changes.METHOD, None, (json.dumps({**STOCK, "watermark": 0.1}),)
    )
    assert answer["set"]["watermark"] == 0.1
