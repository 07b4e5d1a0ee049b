"""Paging changes no answer, whatever is around and inside the pages."""

import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method import PlaneShape
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.paging import Paging
from kvtune.policies.paged_plane import PagedPlane
from kvtune.policies.plane import Plane, PlaneContext, full_plane


class TestPaging(MethodContract):
    samples = ("paging", "paging:block_tokens=5")
    exact = "paging"
    stores_each_token_alone = True


class WindowPlane(Plane):
    """A store whose latest tokens have another form."""

    tokens = 0

    def append(self, x):
        raise NotImplementedError

    def read(self):
        raise NotImplementedError

    def clear(self):
        raise NotImplementedError


def test_a_store_with_a_window_is_refused_with_the_reason():
    shape = PlaneShape("key", 2, 8, 4, 0, 4)
    ctx = PlaneContext(shape, torch.float32, torch.device("cpu"))
    assert isinstance(Paging().plane(ctx, full_plane), PagedPlane)
    with pytest.raises(BadInput, match="two kinds of page"):
        Paging().plane(ctx, lambda _: WindowPlane())


@pytest.mark.parametrize(
    ("outside", "inside"),
    [
        ("", "vllm-int8-per-token-head"),
        ("quest:page_tokens=4,budget_tokens=16", ""),
        ("quest:page_tokens=4,budget_tokens=16", "vllm-int8-per-token-head"),
        ("palu", "vllm-int8-per-token-head"),
        ("h2o:heavy_tokens=8,recent_tokens=8", ""),
        ("streaming-llm:window_tokens=16", ""),
    ],
)
def test_pages_change_no_answer_of_what_is_around_and_inside_them(outside, inside):
    engine = tiny_engine()
    around = [part for part in (outside, inside) if part]
    paged_stack = parse_stack(" + ".join([outside, "paging:block_tokens=8", inside]))
    found, sequence = follow(engine, paged_stack, tokens(60), [1, 2, 3])
    expected, _ = follow(engine, parse_stack(" + ".join(around)), tokens(60), [1, 2, 3])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    formula = footprint(paged_stack, engine.layers, 60, 3, observed=sequence.observed())
    assert sequence.measured() == formula


def test_a_forked_sequence_goes_on_by_itself():
    engine, stack = tiny_engine(), parse_stack("paging")
    _, sequence = follow(engine, stack, tokens(20), [])
    alone = [follow(engine, stack, tokens(20), [5, n])[0][-1] for n in (1, 2)]
    engine.decode([sequence], [[5]])
    twin = sequence.fork()
    assert twin.resident_bytes == sequence.resident_bytes
    found = engine.decode([sequence, twin], [[1], [2]])
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one[-1], expected, atol=1e-5, rtol=1e-5)


def test_a_full_cache_forks_into_copies():
    engine = tiny_engine()
    _, sequence = follow(engine, parse_stack("full"), tokens(9), [])
    twin = sequence.fork()
    engine.decode([sequence], [[3]])
    _, expected = follow(engine, parse_stack("full"), tokens(9), [])
    for name, tensor in expected.tensors().items():
        assert torch.equal(twin.tensors()[name], tensor)
