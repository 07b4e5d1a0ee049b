"""Rewritten rows against a loop over tokens: each sees what it is to see, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.rows import kept_rows, without_middle
from kvtune.policies.sink_window import SinkWindow

torch = pytest.importorskip("torch")

SIZE = 8
WIDTH = 40


@st.composite
def batches(draw):
    """Rows of (computed, queries), of which some are padding, and a window."""
    row = st.tuples(st.integers(0, 200), st.integers(1, 100)) | st.just((0, 0))
    return (
        draw(st.lists(row, min_size=1, max_size=6)),
        SinkWindow(draw(st.integers(0, 20)), draw(st.integers(1, 120)), SIZE),
    )


def seen_by_loops(token, sink_window):
    """The places that a token attends to, by the rule of `SinkWindow` in words."""
    page = token // SIZE
    return [
        place
        for place in range(token + 1)
        if place // SIZE < sink_window.sink_blocks
        or place // SIZE >= page - sink_window.window_blocks
    ]


def as_tensors(rows):
    starts, lengths = [0], []
    for computed, queries in rows:
        starts.append(starts[-1] + queries)
        lengths.append(computed + queries)
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


@given(batches())
def test_every_token_sees_what_a_loop_over_places_says(batch):
    rows, sink_window = batch
    starts, lengths = as_tensors(rows)
    # Page p of row r has the number 1000 r + p, so that a place can be read off a table.
    table = torch.arange(len(rows))[:, None] * 1000 + torch.arange(WIDTH)
    kept = kept_rows(starts, lengths, sink_window)
    expected = [
        (row, seen_by_loops(computed + query, sink_window))
        for row, (computed, queries) in enumerate(rows)
        for query in range(queries)
    ]
    if kept is None:
        assert all(len(seen) == max(seen) + 1 for _, seen in expected)
        return
    shorter = without_middle(table[kept.source], sink_window.sink_blocks, kept.dropped)
    found = []
    for index in range(len(kept.source)):
        length = int(kept.lengths[index])
        queries = int(kept.query_starts[index + 1] - kept.query_starts[index])
        places = [
            int(shorter[index, slot // SIZE]) % 1000 * SIZE + slot % SIZE for slot in range(length)
        ]
        owners = {int(shorter[index, slot // SIZE]) // 1000 for slot in range(length)}
        assert owners <= {int(kept.source[index])}
        found += [
            (int(kept.source[index]), places[: length - queries + query + 1])
            for query in range(queries)
        ]
    assert found == expected


def test_padding_stays_a_row_without_tokens():
    starts, lengths = as_tensors([(300, 1), (0, 0), (0, 0)])
    kept = kept_rows(starts, lengths, SinkWindow(4, 16, SIZE))
    assert kept.source.tolist() == [0, 1, 2]
    assert kept.query_starts.tolist() == [0, 1, 1, 1]
    assert kept.lengths.tolist()[1:] == [0, 0]


def test_a_row_that_sees_everything_is_not_cut():
    starts, lengths = as_tensors([(0, 24), (200, 20)])
    kept = kept_rows(starts, lengths, SinkWindow(4, 16, SIZE))
    # Places 200 to 219 are pages 25, 26 and half of 27.
    assert kept.source.tolist() == [0, 1, 1, 1]
    assert kept.query_starts.tolist() == [0, 24, 32, 40, 44]
    # One page of sinks, two of window, and the queries' own.
    assert kept.lengths.tolist() == [24, 32, 32, 28]


def test_the_table_that_was_given_is_left_as_it_was():
    table = torch.arange(6)[None]
    shorter = without_middle(table, 1, torch.tensor([3]))
    assert shorter[0, :3].tolist() == [0, 4, 5]
    assert table.tolist() == [[0, 1, 2, 3, 4, 5]]
