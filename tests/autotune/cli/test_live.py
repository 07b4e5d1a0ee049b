"""The live view of a search: what it shows, and what it leaves out where there is little room."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from kvtune.autotune.cli import console, live
from kvtune.autotune.cli.console import TerminalReporter
from kvtune.autotune.cli.live import LiveReporter, search_reporter
from kvtune.autotune.rounds import Confirming
from kvtune.autotune.search_view import Incumbent, Margin, Plan, RungState, SearchView
from kvtune.profilers.load.progress import Progress

PLAN = Plan(trials=7, left_s=600.0, trial_s=40.0, confirming_s=240.0, asking_s=60.0)
BEST = Incumbent(
    number=3,
    settings="block-size 32, max-num-seqs 128",
    value=4.8123,
    over_stock=1.6,
    meets_goal=True,
    margins=(
        Margin("p95 ttft <= 800ms", 0.4, 0.8),
        Margin("p95 itl <= 80ms", 0.112, 0.08),
        Margin("p50 e2e <= 9s", None, 9.0),
    ),
)
VIEW = SearchView(
    objective="goodput",
    unit="requests/s",
    tried=5,
    most=12,
    best=BEST,
    plan=PLAN,
    ladder=(
        RungState("L0 stock", "done", "", 1),
        RungState("L1 lossless", "open", "block-size, max-num-seqs", 4),
        RungState("L2 near-lossless", "closed", "opens when L1 misses the goal"),
        RungState("L3 lossy", "closed", "--max-harm near-lossless"),
    ),
    failures={"does-not-fit": 2, "crash-under-load": 1},
    out={"given up early": 3},
)
ROUND_S = 5.0
"""From one measurement of a confirmation to the next."""

HALF = Progress(done=30, failed=0, total=60, in_flight=16, elapsed_s=9.0, output_tokens_per_s=812)


@pytest.fixture
def drawn(monkeypatch):
    """The lines of the view on a terminal of this size, and what becomes of them."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])

    def make(
        view=VIEW, *, width=80, height=24, price=None, later_s=0.0, encoding="utf-8", rounds=()
    ):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        terminal = Console(
            file=out, width=width, height=height, force_terminal=True, color_system=None
        )
        monkeypatch.setattr(console, "stderr", terminal)
        reporter = LiveReporter(price_per_hour=price)
        reporter._line = lambda text: None
        reporter.phase("Measuring 6 of 12: block-size 64")
        reporter.load(HALF)
        if view is not None:
            reporter.standing(view)
        now[0] += later_s
        for state in rounds:
            reporter.confirming(state)
            now[0] += ROUND_S
        terminal.print(reporter, end="")
        out.seek(0)
        return out.read().splitlines()

    return make


def line_of(lines, word):
    """The one line that holds a word."""
    (found,) = [line for line in lines if word in line]
    return found.strip()


def test_all_that_is_known_of_a_search_is_on_a_screen_of_80_by_24(drawn):
    lines = drawn()
    assert len(lines) <= 20  # As many as there is room for.
    assert all(len(line) <= 80 for line in lines)
    assert "max goodput" in lines[0]
    assert line_of(lines, "now").endswith("Measuring 6 of 12: block-size 64")
    # Half of a sixth of the columns.
    assert lines[2].strip() == "██████░░░░░░░ 30/60 requests, 16 in flight, 812 tokens/s"
    assert "trial 3, goodput 4.81 requests/s, 1.6 times stock, meets the goal" in line_of(
        lines, "best"
    )
    assert "block-size 32, max-num-seqs 128" in lines[4]
    assert "50%, 400 ms" in line_of(lines, "p95 ttft")
    assert "140%, 112 ms" in line_of(lines, "p95 itl")
    assert "not measured" in line_of(lines, "p50 e2e")
    assert line_of(lines, "L2").endswith("closed opens when L1 misses the goal")
    assert line_of(lines, "L1 loss").endswith("open   4 tried, block-size, max-num-seqs")
    assert line_of(lines, "left").endswith("7 of 12 trials, 10:00 of time")


def test_what_was_given_up_is_no_failure(drawn):
    lines = drawn(height=30)
    assert line_of(lines, "failed").endswith("does-not-fit 2, crash-under-load 1")
    assert line_of(lines, " out ") == "out     given up early 3"
    assert not [line for line in drawn(replace(VIEW, out={}), height=30) if " out " in line]


def test_what_is_left_is_told_with_what_it_goes_to(drawn):
    # 600 s less 240 s and 60 s leave 300 s, which is 7 trials of 40 s and no 8th.
    assert line_of(drawn(), "confirmation").endswith(
        "up to 7 trials of 40 s, confirmation 4:00, questions 1:00"
    )
    tight = replace(VIEW, plan=replace(PLAN, left_s=395.0))
    assert "up to 2 trials of 40 s" in line_of(drawn(tight), "confirmation")
    late = replace(VIEW, plan=replace(PLAN, left_s=120.0))
    assert "no more trials, confirmation 4:00" in line_of(drawn(late), "confirmation")


def test_time_goes_on_between_two_trials(drawn):
    assert "9:15 of time" in line_of(drawn(later_s=45.0), "left")
    assert "0:00 of time" in line_of(drawn(later_s=4000.0), "left")


def test_without_a_limit_on_time_the_plan_says_about_how_long_it_takes(drawn):
    endless = replace(VIEW, plan=replace(PLAN, left_s=math.inf))
    # 7 * 40 s + 240 s + 60 s
    assert line_of(drawn(endless), "left").endswith("7 of 12 trials, about 9:40")
    fresh = replace(VIEW, best=None, plan=Plan(12, math.inf, 0.0, 0.0, 0.0))
    lines = drawn(fresh)
    assert line_of(lines, "left").endswith("left    12 of 12 trials")
    assert "nothing has a number yet" in line_of(lines, "best")


def test_a_price_says_what_was_spent_and_what_can_still_be_spent(drawn):
    # 7 * 40 s + 240 s + 60 s are expected, 550 s after 30 s: what is left of the time is not used.
    said = line_of(drawn(price=12.0, later_s=30.0), "left")
    assert said.endswith("9:30 of time, about 1.83 to pay, 0.10 spent")


def test_a_confirmation_shows_who_has_what_and_what_is_left_of_it(drawn):
    over = replace(VIEW, plan=replace(PLAN, trials=0))
    first = Confirming(1, 8, {}, left_s=200.0)
    later = Confirming(3, 8, {0: 29.31, 2: 48.2, 6: 47.94}, left_s=90.0, asked_s=45.0)
    lines = drawn(over, rounds=[first], price=12.0)
    assert line_of(lines, "rounds") == "rounds  1 of at most 8"
    assert (
        line_of(lines, "confirmation")
        == "for     no more trials, confirmation 3:20, questions 1:00"
    )
    lines = drawn(over, rounds=[first, later], price=12.0, later_s=10.0)
    assert line_of(lines, "rounds").endswith(
        "3 of at most 8: stock 29.3, trial 2 48.2, trial 6 47.9"
    )
    assert line_of(lines, "confirmation").endswith(
        "no more trials, confirmation 1:30, questions 0:15"
    )
    # 90 s and 15 s, less the 5 s since then; of 600 s of time 20 s have passed.
    said = line_of(lines, "left")
    assert said.endswith("0 of 12 trials, 9:40 of time, about 0.33 to pay, 0.07 spent")


def test_a_search_that_goes_on_after_a_confirmation_shows_its_plan_again(drawn):
    def of(reporter):
        return [line.plain for _, line in reporter._standing_lines(reporter._view, 80)]

    reporter = LiveReporter()
    reporter.standing(VIEW)
    reporter.confirming(Confirming(1, 8, {}, left_s=200.0))
    assert [line for line in of(reporter) if "rounds" in line]
    reporter.standing(VIEW)
    assert not [line for line in of(reporter) if "rounds" in line]


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 10, 14, 24, 60])
def test_lines_fit_a_terminal_of_any_size(width, height, drawn):
    lines = drawn(width=width, height=height)
    assert len(lines) <= max(1, height - 4)
    assert max(map(len, lines)) <= min(width, 100)


def test_what_matters_most_is_kept_where_there_is_little_room(drawn):
    lines = drawn(height=8)
    assert len(lines) == 4
    for word in ("kvtune search", "now", "best", "left"):
        assert line_of(lines, word)


def test_a_terminal_without_block_characters_gets_plain_ones(drawn):
    lines = drawn(encoding="ascii")
    assert lines[2].strip().startswith("######....... 30/60")
    assert all(line.isascii() for line in lines)


def test_the_load_that_was_looked_for_is_told(drawn):
    held = replace(VIEW, best=replace(BEST, load="holds up to 14 requests in flight"))
    assert line_of(drawn(held), "holds") == "holds up to 14 requests in flight"
    assert len(drawn(held)) == len(drawn()) + 1


def test_before_anything_is_known_only_what_is_done_now_is_shown(drawn):
    assert len(drawn(view=None)) == 3


@pytest.mark.parametrize(
    ("terminal", "term", "plain", "kind"),
    [
        (True, "xterm", False, LiveReporter),
        (True, "xterm", True, TerminalReporter),
        (True, "dumb", False, TerminalReporter),
        (False, "xterm", False, TerminalReporter),
    ],
)
def test_only_a_terminal_that_can_draw_gets_a_live_view(terminal, term, plain, kind, monkeypatch):
    shown = Console(file=io.StringIO(), force_terminal=terminal, _environ={"TERM": term})
    monkeypatch.setattr(console, "stderr", shown)
    assert type(search_reporter(plain=plain)) is kind


def test_the_last_state_stays_and_what_was_printed_too(monkeypatch):
    out = io.StringIO()
    shown = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", shown)
    reporter = LiveReporter(price_per_hour=1.0)
    with reporter.live():
        reporter.phase("Measuring 6 of 12: block-size 64")
        reporter.load(HALF)
        reporter.standing(VIEW)
        reporter.note("a remark")
        reporter.phase("Measuring 7 of 12: block-size 16")
        assert "Measuring 7 of 12" in out.getvalue().rpartition("now")[2], "drawn with each line"
    said = out.getvalue()
    last = said[said.rindex("kvtune search") :]
    assert "trial 3, goodput 4.81" in last
    assert "30/60" not in last, "nothing is under way any more"
    assert "a remark" in said
    assert "which cost 0.00 at 1 an hour" in last


def test_an_interrupt_leaves_the_cursor_visible_and_the_state_readable(monkeypatch):
    out = io.StringIO()
    shown = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", shown)
    reporter = LiveReporter()

    def search():
        with reporter.live():
            reporter.standing(VIEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    said = out.getvalue()
    assert "trial 3, goodput 4.81" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


def test_progress_that_ends_while_it_is_drawn_is_drawn_all_the_same(drawn):
    class Ending(LiveReporter):
        """Another thread begins a new step right after each look at its progress."""

        @property
        def _share(self):
            found, self._left_over = self._left_over, None
            return found

        @_share.setter
        def _share(self, value):
            self._left_over = value

    drawn()
    reporter = Ending()
    reporter._share = (1, 2)
    assert "█" in reporter._progress(60).plain
