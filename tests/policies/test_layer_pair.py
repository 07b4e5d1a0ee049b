import math

import pytest
import torch

from kvtune.errors import BadInput
from kvtune.policies.layer_pair import LowerPlane, Pairing, UpperPlane
from kvtune.policies.method import PlaneShape
from kvtune.policies.plane import PlaneContext, full_plane

torch.set_num_threads(1)
HEADS, WIDTH = 2, 4


def pair(*, units=1, t=0.6, retain=0.0, decode_merge=False):
    """The planes of layers 2 and 3, which are merged."""
    sequence = {}

    def context(layer):
        shape = PlaneShape("key", HEADS, WIDTH, 4, layer, 4)
        return PlaneContext(shape, torch.float32, torch.device("cpu"), sequence=sequence)

    below, above = context(2), context(3)
    lower = LowerPlane(Pairing(3, units, t, retain, decode_merge), below, full_plane(below))
    upper = UpperPlane(Pairing(2, units, t, retain, decode_merge), above)
    return lower, upper


def random(tokens, seed):
    return torch.randn(HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def fill(planes, tokens=20):
    vectors = random(tokens, 0), random(tokens, 1)
    for plane, x in zip(planes, vectors, strict=True):
        plane.append(x)
    return vectors


def whole(x):
    """Token vectors over all heads: [tokens, heads * width]."""
    return x.transpose(0, 1).flatten(1)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(whole(a), whole(b), dim=-1).clamp(-1, 1)


def test_both_layers_are_read_in_one_direction_with_their_own_lengths():
    planes = pair()
    x, y = fill(planes)
    lower, upper = (plane.read() for plane in planes)
    torch.testing.assert_close(cosine(lower, upper), torch.ones(20))
    torch.testing.assert_close(whole(lower).norm(dim=-1), whole(x).norm(dim=-1))
    torch.testing.assert_close(whole(upper).norm(dim=-1), whole(y).norm(dim=-1))
    between = cosine(x, y).acos()
    torch.testing.assert_close(cosine(lower, x).acos(), 0.6 * between, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(cosine(upper, y).acos(), 0.4 * between, atol=1e-4, rtol=1e-3)


def test_the_papers_example_is_restored_by_hand():
    lower, upper = pair()
    x, y = torch.zeros(HEADS, 1, WIDTH), torch.zeros(HEADS, 1, WIDTH)
    x[0, 0, 0], y[1, 0, 2] = 3.0, 5.0
    lower.append(x)
    upper.append(y)
    expected = torch.zeros(HEADS, 1, WIDTH)
    expected[0, 0, 0], expected[1, 0, 2] = 0.58779, 0.80902
    torch.testing.assert_close(lower.read(), 3 * expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(upper.read(), 5 * expected, atol=1e-4, rtol=0)


def test_at_the_lower_end_the_lower_layer_is_restored():
    planes = pair(t=0.0)
    x, _ = fill(planes)
    torch.testing.assert_close(planes[0].read(), x, atol=1e-5, rtol=1e-5)


def test_layers_that_agree_in_direction_are_restored():
    lower, upper = pair(retain=0.05)
    x = random(20, 0)
    lower.append(x)
    upper.append(3 * x)
    torch.testing.assert_close(lower.read(), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(upper.read(), 3 * x, atol=1e-5, rtol=1e-5)


def test_the_tokens_that_differ_most_stay_bit_by_bit():
    planes = pair(retain=0.3)
    x, y = fill(planes)
    distance = cosine(x, y).acos() / math.pi
    limit = distance.max() - 0.3 * (distance.max() - distance.min())
    expected = (distance > limit).nonzero().flatten().tolist()
    assert 0 < len(expected) < 20
    for plane, vectors in zip(planes, (x, y), strict=True):
        same = (whole(plane.read()) == whole(vectors)).all(-1)
        assert same.nonzero().flatten().tolist() == expected
        assert plane.facts()["retained"] == len(expected)
    assert int(distance.argmax()) in expected
    assert int(distance.argmin()) not in expected


def test_each_head_by_itself_keeps_the_lengths_of_each():
    planes = pair(units=HEADS, retain=0.3)
    vectors = fill(planes)
    for plane, x in zip(planes, vectors, strict=True):
        torch.testing.assert_close(plane.read().norm(dim=-1), x.norm(dim=-1))
        assert (plane.read() == x).all(-1).sum() == plane.facts()["retained"]


def test_until_the_upper_layer_comes_the_lower_one_is_in_full_precision():
    lower, upper = pair()
    x = random(20, 0)
    lower.append(x)
    assert torch.equal(lower.read(), x)
    assert lower.nbytes == x.numel() * 4
    upper.append(random(20, 1))
    assert upper.freed_bytes == x.numel() * 4
    assert not torch.equal(lower.read(), x)
    upper.append(random(1, 2))
    assert upper.freed_bytes == 0


@pytest.mark.parametrize("decode_merge", [False, True])
def test_generated_tokens_stay_exact_until_the_next_or_for_good(decode_merge):
    lower, upper = pair(decode_merge=decode_merge)
    fill((lower, upper))
    new = [(random(1, 10 + step), random(1, 20 + step)) for step in range(3)]
    for below, above in new:
        lower.append(below)
        upper.append(above)
        assert torch.equal(lower.read()[:, -1:], below)
        assert torch.equal(upper.read()[:, -1:], above)
    assert lower.tokens == upper.tokens == 23
    assert lower.merged_tokens == upper.merged_tokens == (22 if decode_merge else 20)
    merged = cosine(lower.read(), upper.read())[20:22]
    assert bool((merged > 0.9999).all()) == decode_merge


def test_generated_tokens_are_judged_by_the_prompts_angles():
    lower, upper = pair(decode_merge=True, retain=0.05)
    fill((lower, upper))
    before = lower.facts()
    x = random(1, 5)
    for below, above in ((x, x), (x, -x), (x, x)):
        lower.append(below)
        upper.append(above)
    # Opposite directions differ more than any of the prompt, equal ones less.
    assert lower.facts()["retained"] == before["retained"] + 1
    assert torch.equal(upper.read()[:, -2:-1], -x)


@pytest.mark.parametrize("units", [1, HEADS])
def test_an_eviction_shows_in_the_lower_layer_at_once_and_in_the_upper_when_it_follows(units):
    lower, upper = pair(units=units, retain=0.3)
    fill((lower, upper))
    lower.append(random(1, 3))
    below = lower.read()
    index = torch.tensor([[0, 3, 4, 9, 15, 19, 20]])
    lower.keep(index)
    assert torch.equal(lower.read(), below[:, index[0]])
    assert lower.tokens == 7
    upper.append(random(1, 4))
    above = upper.read()
    assert upper.tokens == 21
    upper.keep(index)
    assert torch.equal(lower.read(), below[:, index[0]])
    assert torch.equal(upper.read(), above[:, index[0]])
    lower.append(random(1, 5))
    upper.append(random(1, 6))
    assert torch.equal(lower.read()[:, :7], below[:, index[0]])


def test_heads_may_keep_different_tokens_where_each_is_merged_by_itself():
    lower, upper = pair(units=HEADS, retain=0.3)
    fill((lower, upper))
    below, above = lower.read(), upper.read()
    index = torch.tensor([[0, 3, 9, 19], [1, 2, 9, 12]])
    for plane in (lower, upper):
        plane.keep(index)
    for plane, before in ((lower, below), (upper, above)):
        expected = torch.stack([before[head, index[head]] for head in range(HEADS)])
        assert torch.equal(plane.read(), expected)


def test_heads_that_keep_different_numbers_of_merged_tokens_restore_the_surplus():
    lower, upper = pair(units=HEADS, retain=0.3)
    fill((lower, upper))
    for step in range(3):
        lower.append(random(1, 30 + step))
        upper.append(random(1, 40 + step))
    shown = lower.read(), upper.read()
    index = torch.tensor([[0, 3, 9, 21, 22], [1, 2, 9, 12, 22]])
    for plane in (lower, upper):
        plane.keep(index)
    assert lower.merged_tokens == upper.merged_tokens == 3
    for plane, before in zip((lower, upper), shown, strict=True):
        expected = torch.stack([before[head, index[head]] for head in range(HEADS)])
        assert torch.equal(plane.read(), expected)


def test_heads_that_are_merged_together_must_keep_the_same_tokens():
    lower, upper = pair()
    fill((lower, upper))
    index = torch.tensor([[0, 3], [1, 2]])
    lower.keep(index)
    with pytest.raises(BadInput) as refused:
        upper.keep(index)
    assert "per_head=true" in refused.value.fix


def test_layers_that_hold_different_tokens_are_refused():
    lower, upper = pair()
    fill((lower, upper))
    lower.append(random(1, 3))
    with pytest.raises(BadInput, match="21 and 20 tokens"):
        lower.append(random(1, 4))
    lower, upper = pair()
    fill((lower, upper))
    with pytest.raises(BadInput, match="different tokens"):
        upper.keep(torch.tensor([[0, 1]]))


def test_a_layer_whose_partner_takes_no_part_stays_as_it_is():
    for plane in pair():
        plane.sequence.pop(("half", plane.pairing.partner, "key"))
        x = random(20, 0)
        plane.append(x)
        plane.append(x[:, :1])
        assert torch.equal(plane.read(), torch.cat((x, x[:, :1]), dim=1))
        plane.keep(torch.tensor([[0, 20]]))
        assert torch.equal(plane.read(), torch.cat((x[:, :1], x[:, :1]), dim=1))


def test_settled_tokens_are_those_that_no_append_will_merge():
    lower, upper = pair(decode_merge=True)
    fill((lower, upper))
    # The lower layer was last read before its prompt was merged.
    assert lower.settled_tokens == 0
    for step in range(2):
        before = lower.read()[:, : lower.settled_tokens]
        lower.append(random(1, 3 + step))
        assert torch.equal(lower.read()[:, : before.shape[1]], before)
        upper.append(random(1, 5 + step))
    assert lower.settled_tokens == 20


def test_nothing_is_held_after_clear():
    lower, upper = pair(retain=0.3)
    fill((lower, upper))
    for plane in (lower, upper):
        plane.clear()
        assert plane.tokens == 0
        assert plane.nbytes == 0
