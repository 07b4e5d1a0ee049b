"""The latest queries are the same however the prompt was cut, and know where they stood."""

import pytest
import torch

from kvtune.policies.eviction import EvictorContext, Seen
from kvtune.policies.method import LayerShape
from kvtune.policies.query_window import QueryWindow

CONTEXT = EvictorContext(
    LayerShape(0, 1, 2, 1, 4, 4, 4), 0.5, None, torch.float32, torch.device("cpu")
)


def seen(queries, start, stop):
    keys = torch.ones(1, stop, 4)
    at = torch.arange(start, stop)
    return Seen(queries[:, start:stop], at, keys, keys, torch.arange(stop)[None], CONTEXT)


@pytest.mark.parametrize("cuts", [[9], [1, 9], [3, 4, 5, 9], [8, 9]])
def test_the_last_queries_survive_any_cut(cuts):
    queries = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    window, start = QueryWindow(3), 0
    for stop in cuts:
        window.add(seen(queries, start, stop))
        start = stop
    assert torch.equal(window.tensors()["queries"], queries[:, 6:])
    looking = window.looking_at(seen(queries, 8, 9))
    assert looking.query_positions.tolist() == [6, 7, 8]
    assert looking.probabilities()[0, 0].count_nonzero(-1).tolist() == [7, 8, 9]


def test_fewer_queries_than_the_window_are_all_held_and_own_their_memory():
    queries = torch.randn(1, 2, 4)
    window = QueryWindow(5)
    window.add(seen(queries, 0, 2))
    held = window.tensors()["queries"]
    assert torch.equal(held, queries)
    assert held.data_ptr() != queries.data_ptr()
    window.clear()
    assert window.tensors() == {}


def test_a_shortened_window_holds_the_latest_queries_and_where_they_stood():
    queries = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    window = QueryWindow(5)
    window.add(seen(queries, 0, 9))
    window.shorten(7)
    assert window.tensors()["queries"].shape[1] == 5
    window.shorten(2)
    assert torch.equal(window.tensors()["queries"], queries[:, 7:])
    assert window.looking_at(seen(queries, 8, 9)).query_positions.tolist() == [7, 8]
