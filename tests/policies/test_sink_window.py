"""What StreamingLLM keeps, against what every token of a request is supposed to see."""

from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies.sink_window import SinkWindow

windows = st.builds(SinkWindow, st.integers(0, 70), st.integers(1, 200), st.sampled_from([8, 32]))


def test_both_are_rounded_up_to_whole_pages():
    # 4 sinks fill one page of 32; 100 tokens of window fill four.
    sink_window = SinkWindow(sink_tokens=4, window_tokens=100, block_tokens=32)
    assert (sink_window.sink_blocks, sink_window.window_blocks) == (1, 4)
    # Page 6 sees page 0 and pages 2 to 5, so page 1 goes once page 6 is begun.
    assert sink_window.dropped_blocks(5 * 32 + 31) == (1, 1)
    assert sink_window.dropped_blocks(6 * 32) == (1, 2)
    assert sink_window.exact_tokens == 6 * 32


def test_without_sinks_the_window_alone_stays():
    assert SinkWindow(0, 64, 32).dropped_blocks(10 * 32) == (0, 8)


@given(windows, st.integers(0, 2000))
def test_the_exact_tokens_are_those_before_which_nothing_is_dropped(sink_window, computed):
    first, end = sink_window.dropped_blocks(computed)
    assert (first == end) == (computed < sink_window.exact_tokens)


@given(windows, st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 3))
def test_no_request_ever_holds_more_than_it_is_admitted_for(sink_window, chunks, batches):
    """Chunks of any size, of which up to so many are in flight and none of them settled."""
    size, limit = sink_window.block_tokens, batches * max(chunks)
    scheduled, most = [], 0
    for chunk in chunks:
        settled = sum(scheduled[: max(0, len(scheduled) - batches + 1)])
        scheduled.append(chunk)
        first, end = sink_window.dropped_blocks(settled)
        most = max(most, -(-sum(scheduled) // size) - (end - first))
    assert most <= sink_window.blocks_per_request(limit, sum(chunks))
    assert sink_window.blocks_per_request(limit, sum(chunks)) <= -(-sum(chunks) // size)


def test_the_bound_is_reached():
    # Settled are 33 tokens: page 1 is begun, window and sinks are gone from nothing. In flight are
    # 64 more, which end in page 3: pages 0 to 3, and the bound for no sink and window 1 is 1+2+1.
    sink_window = SinkWindow(0, 1, 32)
    assert sink_window.blocks_per_request(64) == 4
    held = -(-(33 + 64) // 32) - sink_window.dropped_blocks(33)[1]
    assert held == 4


def test_a_shorter_model_holds_no_more_than_its_length():
    assert SinkWindow(4, 1024, 32).blocks_per_request(2048, max_model_len=512) == 16
