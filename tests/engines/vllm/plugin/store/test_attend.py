"""Rows are attended together where they may be, and each token gets what it sees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.store.attend import attend, read_pages, rows_together

torch.set_num_threads(1)

PAGE = 4


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=8).filter(
        lambda rows: all(sum(row) for row in rows)
    ),
    st.integers(1, 20),
)
def test_every_query_is_in_one_group_with_its_rows_pages(rows, most):
    """`rows`: tokens that are computed, and those that ask."""
    starts = torch.tensor([0, *(queries for _, queries in rows)]).cumsum(0).int()
    lengths = torch.tensor([computed + queries for computed, queries in rows]).int()
    # Beyond a row's own pages a table holds leftovers, which are not to be read.
    table = torch.full((len(rows), 12), 99).int()
    for row, length in enumerate(lengths.tolist()):
        held = -(-length // PAGE)
        table[row, :held] = torch.arange(held) + 100 * (row + 1)
    seen = {}
    for group in rows_together(starts, lengths, table, PAGE, most):
        assert len(group.numbers) == 1 or group.tokens.shape[1] == 1
        assert len(group.numbers) == 1 or group.table.numel() <= most
        for at, row in enumerate(group.numbers):
            held = -(-int(lengths[row]) // PAGE)
            assert group.table[at, :held].tolist() == table[row, :held].tolist()
            assert not group.table[at, held:].any()
            for token, place in zip(
                group.tokens[at].tolist(), group.places[at].tolist(), strict=True
            ):
                assert token not in seen
                seen[token] = (row, place)
    expected = [
        (row, place)
        for row, (computed, queries) in enumerate(rows)
        for place in range(computed, computed + queries)
    ]
    assert [seen[token] for token in sorted(seen)] == expected


def test_long_rows_do_not_make_short_ones_long():
    lengths = torch.tensor([400, 8, 9, 390, 20]).int()
    table = torch.zeros(5, 100).int()
    groups = rows_together(torch.arange(6), lengths, table, PAGE, 10_000)
    assert [group.numbers for group in groups] == [[1, 2], [4], [3, 0]]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20))
def test_pages_are_read_in_the_order_of_the_table(seed):
    random = torch.Generator().manual_seed(seed)
    cache = torch.randn(6, 2, PAGE, 10, generator=random)
    table = torch.randint(6, (3, 2), generator=random)
    keys, values = read_pages(cache, table, lambda pages: (pages[..., :7], pages[..., 7:]))
    assert keys.shape == (3, 2, 2 * PAGE, 7)
    assert values.shape == (3, 2, 2 * PAGE, 3)
    for row in range(3):
        for head in range(2):
            for place in range(2 * PAGE):
                cell = cache[table[row, place // PAGE], head, place % PAGE]
                assert torch.equal(
                    torch.cat((keys[row, head, place], values[row, head, place])), cell
                )


@pytest.mark.parametrize("heads", [2, 6])
def test_queries_get_the_softmax_of_what_they_see(heads, monkeypatch):
    monkeypatch.setattr("kvtune.engines.vllm.plugin.store.attend.BLOCK_QUERIES", 2)
    random = torch.Generator().manual_seed(0)
    query = torch.randn(5, heads, 8, generator=random)
    keys, values = torch.randn(2, 1, 2, 9, 8, generator=random).unbind(0)
    (rows,) = rows_together(
        torch.tensor([0, 5]), torch.tensor([9]), torch.zeros(1, 3).int(), PAGE, 1
    )
    output = torch.zeros_like(query)
    every_other = torch.arange(9) % 2 == 0
    attend(
        query,
        keys,
        values,
        rows,
        lambda places: (torch.arange(9) <= places[..., None]) & every_other,
        0.3,
        output,
    )
    for token in range(5):
        for head in range(heads):
            seen = [place for place in range(4 + token + 1) if place % 2 == 0]
            own = head * 2 // heads
            weights = (0.3 * keys[0, own, seen] @ query[token, head]).softmax(0)
            assert torch.allclose(output[token, head], weights @ values[0, own, seen], atol=1e-5)
