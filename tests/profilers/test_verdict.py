"""What holds a workload back, on windows recorded on a real server and on doubtful ones."""

from dataclasses import replace

import pytest
from contracts.windows import (
    KV_BYTES_PER_TOKEN,
    WEIGHT_BYTES,
    capacity,
    gauges,
    idle,
    long_decode,
    long_prompts,
    one_prefix,
    prefill_only,
    prefixes_in_turn,
    revisited_prefixes,
    row,
    shared_prefix,
    short_decode,
    step_time,
    with_idle_time,
)
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.verdict import judge
from kvtune.profilers.window import WAITING, WAITING_CAPACITY, Window
from kvtune.types import Bottleneck, EffectiveConfig

# --- windows recorded on a real server ---


@pytest.mark.parametrize(
    ("seen", "bottleneck", "confidence"),
    [
        (capacity(), Bottleneck.KV_CAPACITY, "high"),
        # Most of the traffic peak, but two thirds of what is read are weights.
        (shared_prefix(), Bottleneck.WEIGHT_BANDWIDTH, "medium"),
        (prefill_only(), Bottleneck.COMPUTE, "high"),
        (short_decode(), Bottleneck.WEIGHT_BANDWIDTH, "high"),
        (long_decode(), Bottleneck.KV_BANDWIDTH, "high"),
        (prefixes_in_turn(), Bottleneck.PREFIX_THRASH, "high"),
        (one_prefix(), Bottleneck.COMPUTE, "medium"),
        (idle(), Bottleneck.IDLE, "high"),
    ],
)
def test_recorded_window_is_recognised(seen, bottleneck, confidence):
    verdict = judge(seen)
    assert verdict.bottleneck is bottleneck
    assert verdict.confidence == confidence


def test_waiting_below_full_usage_is_capacity_when_the_next_prompt_has_no_room():
    verdict = judge(
        long_prompts(prompt=9000, samples=[(2, 1, 0.39), (1, 2, 0.62), (1, 2, 0.62), (0, 2, 0.6)])
    )
    assert row(verdict, "peak_kv_usage").holds is False
    assert row(verdict, "free_kv_mean_prompts_while_waiting").holds is True
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_CAPACITY, "high")


def test_waiting_for_the_token_budget_is_not_called_capacity():
    # Measured: four times the KV memory changed neither the duration nor the queue time.
    verdict = judge(long_prompts())
    assert row(verdict, "queue_time_share").holds is True
    assert row(verdict, "free_kv_mean_prompts_while_waiting").value > 2
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "No single resource dominates" in verdict.summary
    assert "prefill and decoding apart" in verdict.next_experiment


def test_waiting_with_free_slots_and_unknown_cache_size_is_capacity_with_little_confidence():
    verdict = judge(long_prompts(kv_tokens=None))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_CAPACITY, "low")
    assert any("kv_cache_size_tokens" in item for item in verdict.missing)


# --- traps ---


def test_single_preemption_among_many_requests_is_no_bottleneck():
    seen = short_decode(preemptions=1, requests=200, steps=2400, step_tokens=200 * 128)
    assert judge(seen).bottleneck is not Bottleneck.KV_CAPACITY


def test_full_batch_with_room_in_the_cache_is_batch_width():
    seen = short_decode(
        max_num_seqs=8, queue_s=30.0, samples=[(6, 8, 0.1)] * 9 + [(0, 4, 0.05)] * 2
    )
    verdict = judge(seen)
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.BATCH_WIDTH, "high")
    assert "raising max_num_seqs will help" in verdict.summary
    assert "KV levers will not help" in verdict.summary


def test_full_batch_in_a_full_cache_is_capacity():
    seen = short_decode(max_num_seqs=8, queue_s=30.0, samples=[(6, 8, 0.97)] * 9)
    assert judge(seen).bottleneck is Bottleneck.KV_CAPACITY


def test_lower_limit_of_active_sequences_counts():
    seen = short_decode(queue_s=30.0, samples=[(6, 4, 0.1)] * 9)
    seen = replace(
        seen,
        effective=EffectiveConfig(
            max_num_seqs=256, max_num_active_seqs=4, kv_cache_size_tokens=23296
        ),
    )
    assert judge(seen).bottleneck is Bottleneck.BATCH_WIDTH


@pytest.mark.parametrize("labelled", [True, False])
def test_waiting_on_an_attached_server_without_its_limits_is_not_judged(labelled):
    samples = gauges(*[(6, 8, 0.3)] * 10)
    if not labelled:
        samples[WAITING] = samples.pop(WAITING_CAPACITY)
    verdict = judge(replace(short_decode(queue_s=30.0), gauges=samples, effective=None))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert any("max_num_seqs" in item for item in verdict.missing)
    assert "max_num_seqs" in verdict.next_experiment


def test_preemptions_are_capacity_even_if_nothing_else_is_known():
    seen = replace(capacity(), effective=None, gauges={}, weight_bytes=None)
    assert (judge(seen).bottleneck, judge(seen).confidence) == (Bottleneck.KV_CAPACITY, "high")


def test_prefill_only_load_is_not_idle_although_its_gauges_read_zero():
    for seen in (prefill_only(), replace(prefill_only(), effective=None, weight_bytes=None)):
        verdict = judge(seen)
        assert verdict.bottleneck is Bottleneck.COMPUTE
        assert row(verdict, "peak_kv_usage").value is None


def test_estimates_of_zero_with_work_done_mean_that_they_are_off():
    seen = short_decode(tflops_per_s=0.0, gbytes_per_s=0.0)
    verdict = judge(seen)
    assert row(verdict, "flops_of_peak").value is None
    assert any("--enable-mfu-metrics" in item for item in verdict.missing)
    assert verdict.bottleneck is Bottleneck.WEIGHT_BANDWIDTH
    # Weights alone explain the traffic, so its estimate stands in for the engine's.
    assert row(verdict, "memory_traffic_of_peak").value == pytest.approx(0.632, abs=0.001)


def test_unknown_model_is_named_as_missing():
    verdict = judge(short_decode(weight_bytes=None, peak_flops_per_s=None))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert any("--model" in item for item in verdict.missing)
    assert "--model" in verdict.next_experiment


def test_what_is_asked_for_can_be_done():
    unknown = short_decode(
        weight_bytes=None, peak_flops_per_s=None, peak_bytes_per_s=None, queue_s=30.0
    )
    samples = gauges(*[(6, 8, 0.3)] * 10)
    for seen in (unknown, replace(unknown, effective=None, gauges=samples)):
        verdict = judge(seen)
        asked = " ".join([*verdict.missing, verdict.next_experiment])
        assert "flops_of_peak: measure the device that the server runs on, while it is" in asked
        assert "kvtune doctor --measure" in asked
        assert "give" not in asked.lower()
        assert row(verdict, "flops_of_peak").holds is None, "the row is there, and unknown"
    assert "VLLM_SERVER_DEV_MODE=1" in verdict.next_experiment
    assert '--engine-args "--max-num-seqs N"' in verdict.next_experiment


def test_evicted_prefix_blocks_are_shown():
    seen = short_decode()
    key = "vllm:kv_block_idle_before_evict_seconds_count"
    seen = replace(seen, counters={**seen.counters, key: 67})
    assert row(judge(seen), "evicted_cached_blocks").holds is True
    assert any("--kv-cache-metrics" in item for item in judge(short_decode()).missing)


# --- too little to judge ---


def test_server_without_statistics_is_not_judged():
    verdict = judge(Window(window_s=60.0, counters={"process_cpu_seconds_total": 9.0}))
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "--disable-log-stats" in verdict.next_experiment


@pytest.mark.parametrize(
    "seen",
    [
        capacity(window_s=1.0),
        short_decode(requests=3, steps=40),
        idle(samples=[(1, 2, 0.1)] * 10),  # in flight, and not one step
    ],
)
def test_too_little_evidence_is_not_judged(seen):
    verdict = judge(seen)
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert verdict.next_experiment
    assert verdict.missing


def test_rare_requests_are_idle():
    seen = short_decode(window_s=60.0, samples=[(0, 8, 0.04)] * 3 + [(0, 0, 0.0)] * 25)
    assert judge(seen).bottleneck is Bottleneck.IDLE


# --- bursts ---

SLOTS = {"max_num_seqs": 8, "queue_s": 30.0, "samples": [(6, 8, 0.1)] * 9}
NO_ROOM = {"prompt": 9000, "samples": [(2, 1, 0.39), (1, 2, 0.62), (1, 2, 0.62), (0, 2, 0.6)]}


@pytest.mark.parametrize(
    ("seen", "bottleneck"),
    [
        (capacity(), Bottleneck.KV_CAPACITY),
        (long_prompts(**NO_ROOM), Bottleneck.KV_CAPACITY),
        (short_decode(**SLOTS), Bottleneck.BATCH_WIDTH),
        # Nobody was scheduled yet of those that wait: only the gauges tell of them.
        (short_decode(**{**SLOTS, "queue_s": 0.0}), Bottleneck.BATCH_WIDTH),
    ],
    ids=["preempted", "no room", "slots", "slots, none finished"],
)
def test_what_requests_wait_for_in_bursts_is_named_however_long_the_server_idles(seen, bottleneck):
    steady, bursts = judge(seen), judge(with_idle_time(seen, 9))
    assert steady.bottleneck is bursts.bottleneck is bottleneck
    assert bursts.summary.startswith("The server idles between bursts: it is busy ")
    assert bursts.summary.endswith(steady.summary)
    assert (bursts.next_experiment, bursts.confidence) == (
        steady.next_experiment,
        steady.confidence,
    )


def test_bursts_that_wait_for_the_token_budget_are_judged_by_their_steps():
    """Eight prompts at once, one a step of 0.2 s, four times a minute: they wait 3.5 steps each."""
    bursts = prefill_only(
        window_s=60.0,
        requests=32,
        steps=32,
        step_tokens=32 * 1025,
        samples=[(0, 0, 0.0)] * 60,
        queue_s=32 * 3.5 * 0.2,
        prefill_s=32 * 0.2,
        tflops_per_s=0.06,
        gbytes_per_s=0.2,
    )
    verdict = judge(bursts)
    assert row(verdict, "queue_time_in_steps").value == pytest.approx(3.5)
    assert verdict.bottleneck is Bottleneck.COMPUTE
    assert "idles between bursts" in verdict.summary


def test_a_server_that_is_nearly_idle_is_idle_though_requests_wait_for_the_step_under_way():
    """30 prompts a minute at random: a tenth of their time is waiting, an eighth of a step each."""
    seen = prefill_only(
        window_s=60.0,
        requests=30,
        steps=30,
        step_tokens=30 * 1025,
        samples=[(0, 0, 0.0)] * 60,
        queue_s=30 * 0.125 * 0.2,
        prefill_s=30 * 0.2,
    )
    verdict = judge(seen)
    assert row(verdict, "queue_time_share").holds is True
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.IDLE, "high")


def test_an_arrival_caught_in_passing_makes_no_burst_of_an_idle_server():
    """One sample of sixty holds a request at work and another that waits for its step."""
    samples = [(0, 0, 0.0)] * 59 + [(1, 1, 0.01)]
    load = {"window_s": 60.0, "requests": 12, "steps": 400, "prefill_s": 0.2, "decode_s": 1.0}
    verdict = judge(short_decode(samples=samples, queue_s=0.01, **load))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.IDLE, "high")


def test_a_preemption_is_a_fact_even_where_little_was_seen():
    verdict = judge(short_decode(requests=3, steps=40, preemptions=1))
    assert (verdict.bottleneck, verdict.confidence) == (Bottleneck.KV_CAPACITY, "medium")


def test_saturated_load_client_is_not_blamed_on_the_server():
    load = {"client_cpu_s_per_request": 0.01, "requests_per_s": 95.0}
    seen = replace(short_decode(), load=load, is_load_ours=True)
    assert judge(seen).bottleneck is Bottleneck.ABSTAIN
    assert "client" in judge(seen).summary
    spare = replace(seen, load={**load, "requests_per_s": 40.0})
    assert judge(spare).bottleneck is Bottleneck.WEIGHT_BANDWIDTH


# --- properties ---

loads = st.sampled_from(
    [
        capacity,
        shared_prefix,
        long_prompts,
        prefill_only,
        short_decode,
        long_decode,
        revisited_prefixes,
    ]
)
windows = st.one_of(loads, st.just(idle))


@given(windows)
def test_every_sign_is_shown_and_unknown_ones_are_unknown(make):
    verdict = judge(make())
    names = [item.metric for item in verdict.evidence]
    assert len(names) == len(set(names)) >= 30
    assert all((item.holds is None) or item.value is not None for item in verdict.evidence)
    assert all(item.says and item.source and item.unit for item in verdict.evidence)
    assert verdict.summary


@given(windows, st.integers(2, 50))
def test_longer_window_of_the_same_load_gets_the_same_verdict(make, factor):
    seen = make()
    longer = replace(
        seen,
        window_s=seen.window_s * factor,
        counters={key: value * factor for key, value in seen.counters.items()},
    )
    assert judge(longer).bottleneck is judge(seen).bottleneck
    assert judge(longer).summary == judge(seen).summary


@given(windows, st.integers(1, 100))
def test_requests_that_are_redone_always_mean_capacity(make, preemptions):
    assert judge(make(preemptions=preemptions)).bottleneck is Bottleneck.KV_CAPACITY


@given(loads, st.integers(4, 40))
def test_a_load_in_which_nobody_waits_is_idle_where_the_server_mostly_is(make, times):
    seen = make(queue_s=0.0, preemptions=0, samples=[(0, 12, 0.3)] * 8)
    assert judge(with_idle_time(seen, times)).bottleneck is Bottleneck.IDLE


amounts = st.one_of(st.just(0.0), st.floats(0, 1e15))
KEYS = sorted(revisited_prefixes().counters)
models = st.builds(
    step_time,
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 1),
    weight_read_s=st.one_of(st.none(), st.floats(0, 10)),
)


@given(
    st.floats(0.001, 1e5),
    st.dictionaries(st.sampled_from(KEYS), amounts),
    st.lists(st.tuples(amounts, amounts, st.floats(0, 1)), max_size=5),
    st.booleans(),
    st.one_of(st.none(), st.floats(1, 1e15)),
    st.one_of(st.none(), models),
)
def test_any_window_gets_a_verdict(window_s, counters, samples, known, peak, model):
    effective = EffectiveConfig(max_num_seqs=8, kv_cache_size_tokens=4096, block_size_tokens=16)
    seen = Window(
        window_s=window_s,
        counters=counters,
        gauges=gauges(*samples) if samples else {},
        effective=effective if known else None,
        peak_flops_per_s=peak,
        peak_bytes_per_s=peak,
        weight_bytes=WEIGHT_BYTES if known else None,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        step_time=model,
        reusable_prefix_share={16: 0.5, 64: 0.4} if known else {},
    )
    verdict = judge(seen)
    assert verdict == judge(seen)
    if verdict.bottleneck is Bottleneck.ABSTAIN:
        assert verdict.next_experiment
    assert sum(verdict.shares.values()) <= 1 + 1e-9
    assert all(share >= 0 for share in verdict.shares.values())
