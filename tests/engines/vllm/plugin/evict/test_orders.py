"""Pages as bits of a number."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.evict.orders import Eviction, mask_of


def test_neighbouring_pages_go_in_one_run():
    eviction = Eviction(first_token=400, mask=mask_of([2, 3, 4, 7, 9, 10]))
    assert eviction.runs() == [(2, 5), (7, 8), (9, 11)]
    assert eviction.pages == 6


@given(st.sets(st.integers(0, 300)))
def test_runs_hold_the_pages_of_the_mask_and_no_others(pages):
    runs = Eviction(0, mask_of(pages)).runs()
    assert [page for first, end in runs for page in range(first, end)] == sorted(pages)
    assert all(end < first for (_, end), (first, _) in pairwise(runs))
