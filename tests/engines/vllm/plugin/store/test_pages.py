"""Pages are read once each, and rows split where too many are in full precision."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.store.pages import groups_of_rows, read_pages, rows_by_page

PAGE = 4


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1), st.data())
def test_every_row_finds_its_own_pages_among_those_read(rows, data):
    lengths = [
        data.draw(st.integers((len(row) - 1) * PAGE + 1, len(row) * PAGE), label="length")
        for row in rows
    ]
    # Beyond a row's own pages a table holds leftovers, which are not to be read.
    table = torch.full((len(rows), 8), 99, dtype=torch.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = torch.tensor(row)
    pages, numbered = read_pages(table, torch.tensor(lengths, dtype=torch.int32), PAGE)
    assert pages.tolist() == sorted({page for row in rows for page in row})
    assert numbered.dtype == table.dtype
    assert numbered.shape == (len(rows), max(map(len, rows)))
    for number, row in enumerate(rows):
        assert pages[numbered[number, : len(row)].long()].tolist() == row
    assert int(numbered.min()) >= 0
    assert int(numbered.max()) < len(pages)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 40))
def test_runs_are_as_long_as_they_may(pages, most):
    groups = groups_of_rows(pages, most)
    assert [row for group in groups for row in range(group.start, group.stop)] == list(
        range(len(pages))
    )
    for group, after in zip(groups, [*groups[1:], None], strict=True):
        held = sum(pages[group])
        assert held <= most or group.stop - group.start == 1
        if after is not None:
            assert held + pages[after.start] > most


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 15)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_each_row_asks_from_one_page_which_is_its_last(rows, before):
    """`rows`: tokens that are computed, and those that ask; others come `before` in the batch."""
    starts = torch.tensor([0, *(queries for _, queries in rows)]).cumsum(0) + before
    lengths = torch.tensor([computed + queries for computed, queries in rows])
    source, new_starts, new_lengths = rows_by_page(starts.int(), lengths.int(), PAGE)
    found = [
        (row, place)
        for row, queries, length in zip(
            source.tolist(), new_starts.diff().tolist(), new_lengths.tolist(), strict=True
        )
        for place in range(length - queries, length)
    ]
    assert found == [
        (row, place)
        for row, (computed, queries) in enumerate(rows)
        for place in range(computed, computed + queries)
    ]
    assert int(new_starts[0]) == before
    pages = [
        {place // PAGE for place in range(length - queries, length)}
        for queries, length in zip(new_starts.diff().tolist(), new_lengths.tolist(), strict=True)
    ]
    assert all(len(one) == 1 for one in pages)
