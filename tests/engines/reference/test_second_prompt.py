"""A prompt after others is compressed together with what they left."""

import torch
from contracts.synthetic_layers import held, layer_cache, random_vectors


def test_a_second_prompt_is_chosen_from_together_with_the_first():
    layer = layer_cache(
        "chunkkv:budget_tokens=12,window_tokens=2,chunk_tokens=1", query_heads=2, kv_heads=1
    )
    vectors = random_vectors(30, query_heads=2, seed=1)
    _, seen = layer.prefill(*(x[:, :20] for x in vectors), torch.arange(20))
    layer.finish_prefill(layer.choose(seen))
    (first,) = held(layer)
    assert len(first) == 12
    out, seen = layer.prefill(*(x[:, 20:] for x in vectors), torch.arange(20, 30))
    layer.finish_prefill(layer.choose(seen))
    (both,) = held(layer)
    assert len(both) == 12
    assert both[-2:] == [28, 29]
    assert set(both) <= {*first, *range(20, 30)}
    assert set(both) & set(first)
    group = layer.groups[0]
    assert torch.equal(group.keys.read()[0], vectors[1][0, both])
    assert torch.equal(group.values.read()[0], vectors[2][0, both])
    assert out.shape == (2, 10, 8)
