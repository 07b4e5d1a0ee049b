"""Rows without what is gone, against what each token is supposed to see."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvtune.engines.vllm.plugin.evict.orders import Eviction, mask_of  # noqa: E402
from kvtune.engines.vllm.plugin.evict.rows import kept_rows, kept_table  # noqa: E402

SIZE, WIDTH = 4, 16


@st.composite
def steps(draw):
    """Rows as (computed, queries), and evictions of some of them."""
    rows, evictions = [], {}
    for row in range(draw(st.integers(1, 4))):
        computed = draw(st.integers(0, 40))
        queries = draw(st.integers(1, 24))
        rows.append((computed, queries))
        theirs, gone = [], set()
        for first_token in sorted(draw(st.sets(st.integers(0, 70), max_size=4))):
            pages = draw(st.sets(st.integers(0, 15)))
            gone |= {page for page in pages if (page + 1) * SIZE <= min(first_token, 60)}
            theirs.append(Eviction(first_token, mask_of(gone)))
        if theirs:
            evictions[row] = tuple(theirs)
    return rows, evictions


@given(steps())
def test_every_token_sees_what_is_left_and_itself(step):
    rows, evictions = step
    starts = torch.tensor([0, *[queries for _, queries in rows]]).cumsum(0)
    lengths = torch.tensor([computed + queries for computed, queries in rows])
    table = torch.arange(len(rows) * WIDTH).view(-1, WIDTH) + 100
    kept = kept_rows(starts, lengths, evictions, SIZE)
    left = kept_table(table[kept.source], kept.masks)

    seen = []
    for row in range(len(kept.source)):
        begin, end = kept.query_starts[row : row + 2].tolist()
        length = int(kept.lengths[row])
        for token in range(begin, end):
            sees = length - (end - 1 - token)
            seen.append([(int(left[row, place // SIZE]), place % SIZE) for place in range(sees)])

    expected = []
    for row, (computed, queries) in enumerate(rows):
        for token in range(computed, computed + queries):
            gone = 0
            for eviction in evictions.get(row, ()):
                gone |= eviction.mask if token >= eviction.first_token else 0
            expected.append(
                [
                    (int(table[row, place // SIZE]), place % SIZE)
                    for place in range(token + 1)
                    if not gone >> (place // SIZE) & 1
                ]
            )
    assert seen == expected


def test_a_table_that_nothing_leaves_is_a_new_one():
    table = torch.arange(6).view(2, 3)
    same = kept_table(table, {})
    assert torch.equal(same, table)
    assert same.data_ptr() != table.data_ptr()
