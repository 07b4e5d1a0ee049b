import pytest
from contracts.policy_samples import MIB, on_cpu, on_gpu

from kvtune.policies.kv_memory import KvMemory


def test_only_a_gpu_has_a_share_to_search():
    (knob,) = KvMemory().knobs(on_gpu())
    assert knob.name == "gpu_memory_utilization"
    assert (knob.choices[0], knob.choices[-1], knob.default) == (0.85, 0.95, 0.92)
    choice = KvMemory().choice({"gpu_memory_utilization": 0.95}, on_gpu())
    assert choice.arguments == {"gpu-memory-utilization": 0.95}
    assert "smaller pool serves no more" in KvMemory().supports(on_cpu()).reason


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kv-cache-memory-bytes", 64 * MIB),
        ("num-gpu-blocks-override", 96),
        ("gpu-memory-utilization", 0.5),
    ],
)
def test_a_pool_that_the_user_sized_has_no_share_to_search(argument, value):
    for ctx in (on_cpu(base_arguments={argument: value}), on_gpu(base_arguments={argument: value})):
        support = KvMemory().supports(ctx)
        assert not support.ok
        assert f"{argument} is fixed by --engine-args" in support.reason
