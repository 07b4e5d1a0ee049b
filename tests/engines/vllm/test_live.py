"""Which options can be changed on a running server, and what is asked of it."""

import pytest

from kvtune.engines.base import CannotChange
from kvtune.engines.vllm.live import changed_config, live_arguments, wanted_values
from kvtune.types import EffectiveConfig

PLAIN = {
    "long-prefill-token-threshold",
    "max-num-active-seqs",
    "scheduler-reserve-full-isl",
    "watermark",
}
SIZES = {"max-num-batched-tokens", "max-num-seqs"}
EAGER = {"enforce-eager": True, "kv-cache-memory-bytes": "48M"}


@pytest.mark.parametrize(
    ("arguments", "live"),
    [
        (EAGER, PLAIN | SIZES),
        ({"enforce_eager": True, "num_gpu_blocks_override": 40}, PLAIN | SIZES),
        ({"enforce-eager": True}, PLAIN),
        ({"kv-cache-memory-bytes": "48M"}, PLAIN),
        ({**EAGER, "enable-chunked-prefill": False}, PLAIN),
        ({**EAGER, "speculative-config": {"method": "ngram"}}, set()),
        ({**EAGER, "kv_transfer_config": {}}, set()),
        ({**EAGER, "additional_config.kvtune.quest.pages": 8}, set()),
        ({**EAGER, "additional-config": {"kvtune": {"quest": {"pages": 8}}}}, set()),
        ({**EAGER, "additional-config": {"other": 1}}, PLAIN | SIZES),
    ],
)
def test_sizes_are_live_only_where_they_shape_nothing_but_buffers(arguments, live):
    assert live_arguments(arguments, keeps_sizes=True) == live


def test_sizes_are_never_live_where_graphs_are_captured():
    assert live_arguments(EAGER, keeps_sizes=False) == PLAIN


def test_what_a_start_would_take_by_default_is_asked_for_as_such():
    started = {**EAGER, "watermark": 0.1, "long-prefill-token-threshold": 512}
    wanted = wanted_values(started, {**EAGER, "max_num_seqs": "2k", "watermark": 0.02})
    assert wanted == {
        "long-prefill-token-threshold": 0,
        "max-num-active-seqs": None,
        "max-num-batched-tokens": None,
        "max-num-seqs": 2000,
        "scheduler-reserve-full-isl": None,
        "watermark": 0.02,
    }


@pytest.mark.parametrize(
    ("started", "wanted", "why"),
    [
        ({}, {"block-size": 32}, "--block-size is set when"),
        ({"kv-cache-dtype": "fp8"}, {}, "--kv-cache-dtype is set when"),
        ({"max-num-seqs": 8}, {}, "the default of --max-num-seqs was overridden"),
        ({}, {"max-num-seqs": "many"}, "for vLLM's parser to judge"),
        ({}, {"max-num-seqs": True}, "for vLLM's parser to judge"),
        ({}, {"scheduler-reserve-full-isl": 1}, "for vLLM's parser to judge"),
    ],
)
def test_what_a_change_cannot_give_is_refused_unasked(started, wanted, why):
    with pytest.raises(CannotChange, match=why):
        wanted_values(started, wanted)


HOLDS = {
    "max-num-seqs": 8,
    "max-num-active-seqs": 8,
    "max-num-batched-tokens": 512,
    "long-prefill-token-threshold": 0,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.05,
}


def test_a_changed_configuration_is_what_reads_back():
    before = EffectiveConfig(
        block_size_tokens=32, max_num_seqs=128, start_kind="warm", source=("server_info", "log")
    )
    wanted = wanted_values({}, {"max-num-seqs": 8, "max-num-batched-tokens": 512})
    assert changed_config(before, wanted, HOLDS) == EffectiveConfig(
        block_size_tokens=32,
        max_num_seqs=8,
        max_num_active_seqs=None,
        max_num_batched_tokens=512,
        long_prefill_token_threshold_tokens=0,
        scheduler_reserve_full_isl=True,
        watermark_ratio=0.05,
        start_kind="live",
        source=("scheduler", "server_info", "log"),
    )


@pytest.mark.parametrize(
    "asked", [{"max-num-seqs": 9}, {"max-num-active-seqs": 4}, {"watermark": 0.0}]
)
def test_what_reads_back_differently_is_no_change(asked):
    wanted = wanted_values({}, {"max-num-batched-tokens": 512, "max-num-seqs": 8, **asked})
    with pytest.raises(CannotChange, match="reads back as"):
        changed_config(EffectiveConfig(), wanted, HOLDS)
