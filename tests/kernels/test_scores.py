"""Attention scores equal the plain softmax; pooling and groups are joined as the papers do."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.scores import attention_probs, pool1d, reduce_group  # noqa: E402

torch.set_num_threads(1)

HQ, HK, D = 6, 2, 8
SCALE = D**-0.5


def queries_and_keys(m, n, seed=0, lead=()):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*lead, HQ, m, D, generator=generator)
    k = torch.randn(*lead, HK, n, D, generator=generator)
    return q, k


def plain_probs(q, k, visible, softcap=None):
    """Softmax in numpy, one query head after another: (Hq, m, n)."""
    rows = []
    for head in range(q.shape[0]):
        logits = q[head].double().numpy() @ k[head // (HQ // HK)].double().numpy().T * SCALE
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits) * visible
        total = weights.sum(-1, keepdims=True)
        rows.append(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0))
    return np.stack(rows)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_causal_probabilities_of_the_last_queries_equal_a_plain_softmax(softcap):
    q, k = queries_and_keys(3, 7)
    visible = np.tril(np.ones((7, 7)))[-3:]
    mask = torch.from_numpy(visible).bool()
    probs = attention_probs(q, k, SCALE, mask=mask, softcap=softcap)
    assert probs.shape == (HK, HQ // HK, 3, 7)
    expected = plain_probs(q, k, visible, softcap)
    np.testing.assert_allclose(probs.flatten(0, 1).numpy(), expected, atol=1e-6)


def test_a_query_that_sees_no_key_attends_to_nothing():
    q, k = queries_and_keys(2, 3)
    probs = attention_probs(q, k, SCALE, mask=torch.tensor([[False] * 3, [True] * 3]))
    assert probs[..., 0, :].abs().max() == 0
    torch.testing.assert_close(probs[..., 1, :].sum(-1), torch.ones(HK, HQ // HK))


def test_half_precision_inputs_are_scored_in_float32():
    q, k = queries_and_keys(2, 5)
    low = attention_probs(q.bfloat16(), k.bfloat16(), SCALE)
    assert low.dtype == torch.float32
    torch.testing.assert_close(
        low, attention_probs(q.bfloat16().float(), k.bfloat16().float(), SCALE)
    )


def test_a_row_of_a_batch_scores_as_it_does_alone():
    q, k = queries_and_keys(5, 5, lead=(3,))
    whole = attention_probs(q, k, SCALE)
    assert whole.shape == (3, HK, HQ // HK, 5, 5)
    torch.testing.assert_close(whole[1], attention_probs(q[1], k[1], SCALE))


def test_average_pooling_divides_by_the_full_width():
    scores = torch.tensor([0.0, 0, 9, 0, 0, 1, 0])
    third = 1 / 3
    expected = torch.tensor([0, 3, 3, 3, third, third, third])
    torch.testing.assert_close(pool1d(scores, 3, "avg"), expected)


def test_max_pooling_ignores_the_padding():
    scores = torch.tensor([[-5.0, -1, -9, -7]])
    assert pool1d(scores, 3, "max").tolist() == [[-1, -1, -1, -7]]


def test_pooling_keeps_shapes_and_handles_rows_shorter_than_the_kernel():
    scores = torch.rand(2, 3, 2)
    assert pool1d(scores, 7, "avg").shape == (2, 3, 2)
    torch.testing.assert_close(pool1d(scores, 1, "avg"), scores)
    torch.testing.assert_close(pool1d(scores, 7, "avg")[..., 0], scores.sum(-1) / 7)
    assert pool1d(scores.bfloat16(), 3, "max").dtype == torch.float32


def test_group_reduction_is_over_the_heads_of_a_group():
    per_head = torch.tensor([[[1.0, 4.0], [3.0, 0.0]]])
    assert reduce_group(per_head, "mean").tolist() == [[2, 2]]
    assert reduce_group(per_head, "max").tolist() == [[3, 4]]


def test_arguments_that_make_no_sense_are_refused():
    q, k = queries_and_keys(2, 2)
    with pytest.raises(ValueError, match="multiple of KV heads but got 5 and 2"):
        attention_probs(q[:5], k, SCALE)
    with pytest.raises(ValueError, match="got 'sum'"):
        reduce_group(q, "sum")
    with pytest.raises(ValueError, match="odd and at least 1 but got 4"):
        pool1d(torch.zeros(5), 4, "avg")
    with pytest.raises(ValueError, match="avg or max but got 'min'"):
        pool1d(torch.zeros(5), 3, "min")
    assert math.isclose(float(pool1d(torch.ones(5), 3, "avg")[2]), 1.0, rel_tol=1e-6)
