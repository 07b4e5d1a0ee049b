"""Open pages keep what was written to them, whatever happens to other requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin.store.open_pages import OpenPages

PAGE = 3


class Worker:
    """Carries moves out on lists of tokens, as layers do on tensors."""

    def __init__(self, most):
        self.pages = OpenPages(most)
        self.slots, self.stored, self.early = {}, {}, 0

    def step(self, writes):
        """`writes`: (page, first place, tokens), all within a page."""
        moves = self.pages.step(
            [page for page, _, _ in writes],
            [place == 0 for _, place, _ in writes],
            [place + len(tokens) == PAGE for _, place, tokens in writes],
        )
        assert len(set(moves.slots)) == len(writes)
        self.early += len(moves.early)
        for slot, page in moves.early:
            self.stored[page] = list(self.slots[slot])
        for slot in moves.fresh:
            self.slots[slot] = []
        for slot, page in moves.again:
            self.slots[slot] = list(self.stored[page])
        for slot, (_, place, tokens) in zip(moves.slots, writes, strict=True):
            assert len(self.slots[slot]) == place
            self.slots[slot] = [*self.slots[slot], *tokens]
        for slot, page in moves.full:
            self.stored[page] = list(self.slots[slot])
        assert max(self.slots) < moves.count
        return moves


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_hold_the_tokens_of_their_request_when_they_are_full(data):
    """Requests grow, end anywhere and leave their pages to others, which begin anew."""
    most = data.draw(st.integers(0, 4))
    worker, free, running, token = Worker(most), list(range(12)), [], 0
    for _ in range(30):
        if len(running) < 4 and len(free) > 3:
            running.append([])
        scheduled = data.draw(st.lists(st.sampled_from(running), unique_by=id, min_size=1))
        writes = []
        for request in scheduled:
            for _ in range(data.draw(st.integers(1, 2 * PAGE))):
                if not request or len(request[-1][1]) == PAGE:
                    if not free:
                        break
                    request.append((free.pop(0), []))
                page, tokens = request[-1]
                if writes and writes[-1][0] == page:
                    writes[-1][2].append(token)
                else:
                    writes.append((page, len(tokens), [token]))
                tokens.append(token)
                token += 1
        if not writes:
            break
        worker.step(writes)
        for request in running:
            for page, tokens in request:
                if len(tokens) == PAGE:
                    assert worker.stored[page] == tokens
        for request in data.draw(st.lists(st.sampled_from(running), unique_by=id)):
            running.remove(request)
            free += [page for page, _ in request]
        if not running:
            running.append([])


def test_running_requests_are_never_crowded_out_by_ended_ones():
    worker = Worker(most=2)
    for number in range(50):
        worker.step([(100, number % PAGE, ["a"]), (number, 0, ["b"])])
    assert worker.pages.step([], [], []).count <= 5
    assert worker.early > 40
    # Page 100 is two thirds full, and nothing of it has to be read back from codes.
    assert worker.step([(100, 2, ["a"])]).again == []


def test_a_page_that_was_crowded_out_goes_on_from_what_was_stored():
    worker = Worker(most=1)
    worker.step([(1, 0, ["a"]), (2, 0, ["b"])])
    assert worker.step([(3, 0, ["c"])]).early == [(0, 1)]
    moves = worker.step([(1, 1, ["d", "e"])])
    assert [page for _, page in moves.again] == [1]
    assert worker.stored[1] == ["a", "d", "e"]


def test_slots_of_full_pages_are_used_again():
    worker = Worker(most=8)
    for page in range(20):
        moves = worker.step([(page, 0, ["x"] * PAGE)])
    assert moves.count <= 2
