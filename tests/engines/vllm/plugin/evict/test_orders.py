"""Pages as bits of a number."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.evict.orders import mask_of, runs


def test_neighbouring_pages_go_in_one_run():
    assert runs(mask_of([2, 3, 4, 7, 9, 10])) == [(2, 5), (7, 8), (9, 11)]


@given(st.sets(st.integers(0, 300)))
def test_runs_hold_the_pages_of_the_mask_and_no_others(pages):
    found = runs(mask_of(pages))
    assert [page for first, end in found for page in range(first, end)] == sorted(pages)
    assert all(end < first for (_, end), (first, _) in pairwise(found))
