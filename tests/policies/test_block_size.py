from contracts.policy_samples import on_cpu, on_gpu, workload

from kvtune.policies.block_size import BlockSize


def sizes(ctx):
    return [knob.choices for knob in BlockSize().knobs(ctx)]


def test_each_platform_has_its_sizes_and_its_default():
    assert sizes(on_cpu()) == [(32, 64, 128, 256)]
    assert sizes(on_gpu()) == [(16, 32, 64, 128)]
    assert BlockSize().knobs(on_cpu())[0].default == 128
    assert BlockSize().knobs(on_gpu())[0].default == 16


def test_sizes_that_the_users_match_unit_does_not_divide_are_not_offered():
    assert sizes(on_cpu(base_arguments={"prefix-match-unit": 64})) == [(64, 128, 256)]


def test_nothing_is_searched_where_one_size_is_left():
    assert sizes(on_cpu(base_arguments={"prefix-match-unit": 512})) == []


def test_the_reason_quotes_the_measured_reuse_by_block_size():
    ctx = on_cpu(fingerprint=workload(reuse={32: 0.61, 128: 0.44}))
    because = BlockSize().choice({"block_size": 32}, ctx).because
    assert "61% at 32, 44% at 128" in because
    flat = on_cpu(fingerprint=workload(reuse={32: 0.5, 128: 0.5}))
    assert "%" not in BlockSize().choice({"block_size": 32}, flat).because


def test_smaller_and_larger_blocks_have_different_reasons():
    smaller = BlockSize().choice({"block_size": 32}, on_cpu())
    larger = BlockSize().choice({"block_size": 256}, on_cpu())
    assert "wasted" in smaller.because
    assert "fewer blocks" in larger.because
    assert larger.arguments == {"block-size": 256}
