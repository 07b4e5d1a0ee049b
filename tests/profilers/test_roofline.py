"""Work under a roofline, by hand: 100 steps of 0.1 s, 4 sequences of 1,100 tokens."""

import pytest
from contracts.windows import KV_BYTES_PER_TOKEN, WEIGHT_BYTES, step_time, stepping

from kvtune.policies.model_flops import TokenFlops
from kvtune.profilers.kv_reads import PAGES_READ, PAGES_SEEN
from kvtune.profilers.roofline import roofline
from kvtune.profilers.window import CACHED, PROMPTS

FLOPS = TokenFlops(layers_flop=200e6, head_flop=50e6, context_flop=70e3)
PEAKS = {"peak_flops_per_s": 1e12, "peak_bytes_per_s": 50e9}
MODEL = step_time(0.02, 0.0025, 10e-6)
"""Predicts 0.074 s for 4 sequences that hold 4,400 tokens."""


def work(found):
    return {one.kind: one for one in found.work}


def test_decoding_reads_the_weights_once_and_all_contexts():
    found = roofline(stepping(step_time=MODEL, **PEAKS), FLOPS, 1)
    decode = work(found)["decode"]
    assert decode.sequences == 4
    assert decode.context_tokens == 1100
    assert decode.read_bytes == WEIGHT_BYTES + 4400 * KV_BYTES_PER_TOKEN
    assert decode.flop == pytest.approx(4 * 250e6 + 4400 * 70e3)
    assert decode.duration_s == pytest.approx(0.074)
    # 1.308 Gflop over 370.4 MB are 3.5 flop/byte, far left of the ridge at 20.
    assert found.ridge == 20
    assert found.held_by(decode) == "memory"
    assert found.reached(decode) == pytest.approx(decode.read_bytes / 0.074 / 50e9)


def test_decoding_reads_and_computes_less_where_the_plugin_skips_pages():
    counted = {PAGES_SEEN: 80_000, PAGES_READ: 20_000}
    decode = work(roofline(stepping(counters=counted), FLOPS, 1))["decode"]
    assert decode.context_tokens == 1100, "what requests hold is as before"
    assert decode.read_bytes == WEIGHT_BYTES + 1100 * KV_BYTES_PER_TOKEN
    assert decode.flop == pytest.approx(4 * 250e6 + 1100 * 70e3)


def test_prefill_is_timed_by_what_decoding_leaves_of_a_step():
    prefill = work(roofline(stepping(step_time=MODEL, **PEAKS), FLOPS, 1))["prefill"]
    assert prefill.prompt_tokens == 1000
    assert prefill.flop == pytest.approx(1000 * (200e6 + 500 * 70e3))
    # 20 tokens in the 0.026 s that are left.
    assert prefill.duration_s == pytest.approx(1000 * 0.026 / 20)


def test_prefill_in_chunks_is_a_chunk_and_what_is_cached_is_not_computed():
    seen = stepping(
        effective={"max_num_batched_tokens": 256}, counters={PROMPTS: 2000, CACHED: 800}
    )
    prefill = work(roofline(seen, FLOPS, 1))["prefill"]
    assert prefill.prompt_tokens == 256
    assert prefill.flop == pytest.approx(256 * (200e6 + (400 + 128) * 70e3))


def test_a_mean_step_does_both_in_the_time_that_was_seen():
    mean = work(roofline(stepping(**PEAKS), FLOPS, 1))["mean step"]
    assert mean.duration_s == pytest.approx(0.1)
    # Its 20 prompt tokens attend to half of the prompt on average.
    assert mean.flop == pytest.approx(4 * 250e6 + 4400 * 70e3 + 20 * (200e6 + 500 * 70e3))


def test_devices_share_the_arithmetic():
    alone, shared = (work(roofline(stepping(), FLOPS, count))["decode"] for count in (1, 2))
    assert shared.flop == alone.flop / 2
    assert shared.read_bytes == alone.read_bytes, "the window's bytes are of one device already"


def test_without_a_model_of_steps_decode_and_prefill_are_placed_but_not_timed():
    found = work(roofline(stepping(**PEAKS), FLOPS, 1))
    assert found["decode"].flop_per_s is None
    assert found["prefill"].flop_per_s is None
    assert found["mean step"].flop_per_s > 0


def test_without_ceilings_there_is_no_roof_and_the_reason_is_told():
    found = roofline(stepping(), FLOPS, 1)
    (decode, *_) = found.work
    assert found.ridge is None
    assert found.held_by(decode) is None
    assert found.reached(decode) is None
    (missing,) = found.missing
    assert missing.startswith("the device's ceilings: ")
    assert missing.endswith("kvtune doctor --measure")


@pytest.mark.parametrize(
    ("changed", "flops", "devices", "missing"),
    [
        ({"weight_bytes": None}, FLOPS, 1, "the bytes of weights and KV"),
        ({}, None, 1, "the arithmetic of a token"),
        ({}, FLOPS, None, "the arithmetic of a token"),
        ({"counters": {"vllm:request_prompt_tokens_count": 0}}, FLOPS, 1, "what a step holds"),
    ],
)
def test_what_keeps_work_from_being_placed_is_named(changed, flops, devices, missing):
    found = roofline(stepping(**PEAKS, **changed), flops, devices)
    assert found.work == ()
    assert [entry.partition(":")[0] for entry in found.missing] == [missing]
