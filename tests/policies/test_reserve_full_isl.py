from contracts.policy_samples import on_cpu

from kvtune.policies.reserve_full_isl import ReserveFullIsl


def test_only_turning_it_off_is_an_argument():
    choice = ReserveFullIsl().choice({"scheduler_reserve_full_isl": False}, on_cpu())
    assert choice.arguments == {"scheduler-reserve-full-isl": False}
    assert "first chunk" in choice.because


def test_it_is_refused_where_prompts_are_not_split_or_never_compete():
    whole = on_cpu(base_arguments={"enable-chunked-prefill": False})
    assert "one piece" in ReserveFullIsl().supports(whole).reason
    assert "never waits" in ReserveFullIsl().supports(on_cpu(max_concurrency=1)).reason
