from contracts.policy_samples import MIB, on_cpu, on_gpu

from kvtune.policies.kv_memory import KvMemory


def test_a_limit_is_used_in_full_and_not_searched():
    for ctx in (on_cpu(kv_memory_limit_bytes=64 * MIB), on_gpu(kv_memory_limit_bytes=64 * MIB)):
        assert KvMemory().supports(ctx).ok
        assert KvMemory().knobs(ctx) == ()
        choice = KvMemory().choice({}, ctx)
        assert choice.arguments == {"kv-cache-memory-bytes": 67_108_864}
        assert "64.0 MiB" in choice.because


def test_a_limit_wins_over_larger_memory_in_the_users_arguments():
    base = {"kv-cache-memory-bytes": "1G", "gpu-memory-utilization": 0.5}
    ctx = on_gpu(kv_memory_limit_bytes=64 * MIB, base_arguments=base)
    assert KvMemory().choice({}, ctx).arguments == {"kv-cache-memory-bytes": 67_108_864}


def test_memory_within_the_limit_stays_as_the_user_fixed_it():
    ctx = on_gpu(kv_memory_limit_bytes=64 * MIB, base_arguments={"kv-cache-memory-bytes": "32M"})
    assert "kv-cache-memory-bytes is fixed" in KvMemory().supports(ctx).reason


def test_without_a_limit_only_a_gpu_has_a_share_to_search():
    (knob,) = KvMemory().knobs(on_gpu())
    assert knob.name == "gpu_memory_utilization"
    assert (knob.choices[0], knob.choices[-1], knob.default) == (0.85, 0.95, 0.92)
    choice = KvMemory().choice({"gpu_memory_utilization": 0.95}, on_gpu())
    assert choice.arguments == {"gpu-memory-utilization": 0.95}
    assert "smaller pool serves no more" in KvMemory().supports(on_cpu()).reason


def test_a_fixed_number_of_blocks_leaves_nothing_to_size():
    ctx = on_gpu(base_arguments={"num-gpu-blocks-override": 96}, kv_memory_limit_bytes=MIB)
    assert "num-gpu-blocks-override" in KvMemory().supports(ctx).reason
