import pytest
import torch
from contracts.method import MethodContract
from contracts.synthetic_layers import attending, decode, held, layer_cache, prompt

from kvtune.errors import BadInput
from kvtune.policies.eviction import Span

NONE = 1e-9
ROWS = [[1], [0.5, 0.5], [0.3, 0.3, 0.4], [0.5, NONE, 0.2, 0.3]]
"""The last of 4 tokens looks at 0, 3, 2 and 1, in this order."""


class TestTova(MethodContract):
    samples = ("tova:budget_tokens=16", "tova:budget_tokens=30,fairness=proportional")
    exact = "tova:budget_tokens=47"
    ladder = tuple(f"tova:budget_tokens={n}" for n in (8, 24, 48, 63))


@pytest.mark.parametrize(("budget", "kept"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3])])
def test_what_the_last_token_of_the_prompt_looks_at_stays(budget, kept):
    layer = layer_cache(f"tova:budget_tokens={budget}")
    prompt(layer, attending(ROWS))
    assert held(layer) == [kept]


def test_a_new_token_takes_the_place_of_what_it_looks_at_least():
    layer = layer_cache("tova:budget_tokens=3")
    vectors = attending([*ROWS, [0.1, 0.6, 0.1, 0.15, 0.05]])
    prompt(layer, tuple(x[:, :4] for x in vectors))
    decode(layer, tuple(x[:, 4:] for x in vectors), 4)
    # 0, 2 and 3 were left; the new one looks at itself least of these, and goes.
    assert held(layer) == [[0, 2, 3]]


def test_heads_vote_together():
    one, two = attending(ROWS), attending([*ROWS[:3], [NONE, 0.6, 0.3, 0.1]])

    vectors = tuple(torch.cat(pair) for pair in zip(one, two, strict=True))
    layer = layer_cache("tova:budget_tokens=2", query_heads=2, kv_heads=2)
    prompt(layer, vectors)
    # Means: 0.25, 0.3, 0.25, 0.2; the tie of 0 and 2 goes to the lower.
    assert held(layer) == [[0, 1]]


def test_protected_tokens_stay_although_nobody_looks():
    layer = layer_cache("tova:budget_tokens=2", spans=(Span(1, 2, "system", protected=True),))
    prompt(layer, attending(ROWS))
    assert held(layer) == [[0, 1]]


def test_more_protected_tokens_than_the_budget_are_refused():
    layer = layer_cache("tova:budget_tokens=2", spans=(Span(0, 3, "system", protected=True),))
    with pytest.raises(BadInput, match="must be kept"):
        prompt(layer, attending(ROWS))
