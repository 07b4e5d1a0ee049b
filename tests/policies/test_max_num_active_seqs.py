from contracts.policy_samples import on_cpu, on_gpu

from kvtune.policies.max_num_active_seqs import MaxNumActiveSeqs


def test_on_a_cpu_it_would_only_repeat_max_num_seqs():
    assert "repeat max_num_seqs" in MaxNumActiveSeqs().supports(on_cpu()).reason


def test_where_the_batch_is_fixed_it_is_what_is_left():
    ctx = on_cpu(base_arguments={"max-num-seqs": 16}, max_concurrency=8)
    assert MaxNumActiveSeqs().supports(ctx).ok
    (knob,) = MaxNumActiveSeqs().knobs(ctx)
    assert knob.choices == (2, 3, 4, 6, 16)


def test_it_is_active_only_while_the_batch_is_at_its_default():
    (knob,) = MaxNumActiveSeqs().knobs(on_gpu(max_concurrency=3000))
    assert knob.active_when == {"max_num_seqs": (1024,)}
    assert knob.default == knob.choices[-1] == 1024
