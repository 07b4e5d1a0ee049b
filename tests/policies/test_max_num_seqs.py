from contracts.policy_samples import on_cpu

from kvtune.policies.max_num_seqs import MaxNumSeqs


def test_a_load_that_never_fills_a_batch_is_refused():
    assert "more than 2 in flight" in MaxNumSeqs().supports(on_cpu(max_concurrency=2)).reason
    assert MaxNumSeqs().supports(on_cpu(max_concurrency=3)).ok


def test_narrower_and_wider_batches_have_different_reasons():
    ctx = on_cpu(max_concurrency=300)
    assert "preempted" in MaxNumSeqs().choice({"max_num_seqs": 64}, ctx).because
    wider = MaxNumSeqs().choice({"max_num_seqs": 192}, ctx)
    assert "fewer wait" in wider.because
    assert wider.arguments == {"max-num-seqs": 192}
