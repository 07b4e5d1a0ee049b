import pytest
from contracts.policy_samples import on_cpu, on_gpu

from kvtune.policies.max_num_batched_tokens import MaxNumBatchedTokens


@pytest.mark.parametrize(
    ("ctx", "kind", "low", "high", "default"),
    [
        (on_cpu(), "log2", 256, 8192, 2048),
        (on_cpu(base_arguments={"max-model-len": 1024}), "log2", 256, 2048, 2048),
        (on_cpu(base_arguments={"max-model-len": 3000}), "log2", 256, 4096, 2048),
        (on_cpu(base_arguments={"max-num-seqs": 300}), "log2", 512, 8192, 2048),
        (on_gpu(), "log2", 1024, 8192, 8192),
    ],
)
def test_the_range_lies_between_the_batch_width_and_the_longest_sequence(
    ctx, kind, low, high, default
):
    (knob,) = MaxNumBatchedTokens().knobs(ctx)
    assert (knob.kind, knob.low, knob.high, knob.default) == (kind, low, high, default)


def test_a_stock_budget_that_is_no_power_of_two_is_one_of_the_choices():
    ctx = on_cpu(base_arguments={"tensor-parallel-size": 3, "max-num-seqs": 8})
    (knob,) = MaxNumBatchedTokens().knobs(ctx)
    assert knob.kind == "choice"
    assert knob.choices == (256, 512, 1024, 2048, 4096, 6144, 8192)
    assert knob.default == 6144


def test_whole_prompts_must_fit_where_they_are_not_split():
    ctx = on_cpu(base_arguments={"enable-chunked-prefill": False, "max-model-len": 4096})
    (knob,) = MaxNumBatchedTokens().knobs(on_gpu(base_arguments=ctx.base_arguments))
    assert knob.low == 4096
    assert MaxNumBatchedTokens().knobs(ctx) == ()


def test_small_and_large_budgets_have_different_reasons():
    small = MaxNumBatchedTokens().choice({"max_num_batched_tokens": 512}, on_cpu())
    large = MaxNumBatchedTokens().choice({"max_num_batched_tokens": 4096}, on_cpu())
    assert "shorter steps" in small.because
    assert "fewer steps" in large.because
