"""Progress: a live line on a terminal, a line now and then elsewhere, and never in the results."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from kvtune.autotune.cli import console
from kvtune.autotune.cli.console import TerminalReporter, headline, shares_text
from kvtune.autotune.search_view import Incumbent, Margin, Plan, SearchView
from kvtune.autotune.words import amount, digits, interval
from kvtune.profilers.load.progress import Progress
from kvtune.types import (
    Bottleneck,
    Boundary,
    Failure,
    FailureClass,
    Goal,
    Interval,
    LoadLevel,
    Measurement,
    PolicyStack,
    Slo,
    Status,
    Trial,
    Verdict,
)

HALF = Progress(done=5, failed=1, total=10, in_flight=4, elapsed_s=2.0, output_tokens_per_s=80.0)
TRIAL = Trial(number=3, stack=PolicyStack(), base_arguments={}, repeats=1, seed=0)


@pytest.fixture
def reporter(monkeypatch):
    """A reporter on a terminal 100 columns wide or on a pipe; `said` is what it wrote."""

    def make(terminal, **more):
        shown = Console(
            stderr=True, width=100, force_terminal=terminal, record=True, highlight=False
        )
        monkeypatch.setattr(console, "stderr", shown)
        made = TerminalReporter(**more)
        made.said = lambda: shown.export_text(clear=False)
        return made

    return make


def test_a_trial_that_is_given_up_early_is_one_line(reporter):
    said = "cut after 45% of its requests: at most 0.71x of trial 1"
    quiet = reporter(False)
    quiet.trial(TRIAL, Measurement(status=Status.CUT, share=0.45, cut=said), reused=False)
    assert quiet.said().splitlines() == [f"00:00   trial 3: {said}"]


def test_a_pipe_gets_a_line_only_every_few_seconds(reporter, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    quiet = reporter(False)
    with quiet.live():
        quiet.phase("Measuring 1 of 4: stock defaults")
        for _ in range(20):
            now[0] += 0.5
            quiet.load(HALF)
    lines = quiet.said().splitlines()
    assert lines[0] == "00:00 Measuring 1 of 4: stock defaults"
    assert lines[1] == "00:05   5/10 requests, 1 failed, 4 in flight, 80 tokens/s"
    assert len(lines) == 2


def test_a_starting_server_shows_its_log_until_it_is_ready(reporter, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    quiet = reporter(False)
    quiet.phase("Measuring 1 of 4: stock defaults")
    for line in ("INFO: loading [weights]", ""):
        now[0] += 10
        quiet.server_log(line)
    now[0] += 10
    quiet.ready(20.0)
    now[0] += 10
    quiet.server_log("INFO: a request came")
    said = quiet.said()
    assert "starting the server: INFO: loading [weights]" in said
    assert "ready after 20.0 s" in said
    assert "a request came" not in said


def test_a_terminal_shows_every_step_of_a_replay(reporter):
    live = reporter(True)
    with live.live():
        live.phase("Measuring 1 of 4: stock defaults")
        live.load(HALF)
        assert live._spinner is not None
        assert "5/10 requests" in str(live._spinner.status)
    assert live._spinner is None


def test_the_live_line_is_never_longer_than_the_terminal(reporter):
    live = reporter(True)
    with live.live():
        live.phase("Measuring 2 of 4: " + "max-num-seqs 4, " * 20)
        live.server_log("INFO: " + "loading " * 40)
        shown = str(live._spinner.status)
        assert shown.startswith("Measuring 2 of 4: starting the server: INFO: loading")
        assert len(shown) <= 96


def test_a_trial_is_told_by_its_figures(reporter):
    quiet = reporter(False)
    measurement = Measurement(
        status=Status.OK,
        metrics={"goodput_requests_per_s": (1.0, 1.234), "ttft_p95_s": (0.5, 0.456)},
    )
    quiet.trial(TRIAL, measurement, reused=True)
    # The means of both repeats, as in all other tables.
    assert (
        "trial 3: goodput 1.12 req/s, p95 TTFT 478 ms (known, not measured again)" in quiet.said()
    )


def test_a_trial_is_told_by_what_the_goal_limits(reporter):
    slo = Slo(metric="e2e", statistic="p99", limit_s=2.0)
    quiet = reporter(False, goal=Goal(slos=(slo,)))
    metrics = {"output_tokens_per_s": (1137.0,), "ttft_p95_s": (0.5,), "e2e_p99_s": (2.25,)}
    quiet.trial(TRIAL, Measurement(status=Status.OK, metrics=metrics), reused=False)
    assert quiet.said().endswith("trial 3: 1,140 tokens/s, p99 E2E 2.25 s\n")


def test_a_trial_is_told_by_the_load_that_it_holds_where_that_was_looked_for(reporter):
    metrics = {"boundary_low": (12.0,), "boundary_high": (14.0,), "boundary_load": (13.1,)}
    level = LoadLevel(load=14, violation=0.2, worst="p95 ttft <= 1s")
    found = Measurement(
        status=Status.OK,
        metrics={"goodput_requests_per_s": (2.0,), **metrics},
        boundary=Boundary(unit="requests in flight", levels=(level,)),
    )
    quiet = reporter(False)
    quiet.trial(TRIAL, found, reused=False)
    assert quiet.said().endswith(
        "trial 3: goodput 2 req/s; holds up to 13 requests in flight (12 to 14); "
        "what limits it is p95 ttft <= 1s\n"
    )


def test_lines_tell_where_a_search_stands_once_after_each_trial(reporter):
    plan = Plan(trials=7, left_s=80.0, trial_s=4.0, confirming_s=20.0, asking_s=0.0)
    limits = (Margin("p95 ttft <= 1s", 0.25, 1.0), Margin("p95 itl <= 1s", None, 1.0))
    best = Incumbent(2, "block-size 32", 49.61, 1.78, True, limits)
    view = SearchView("goodput", "requests/s", 3, 10, best, plan)
    quiet = reporter(False, price_per_hour=36.0)
    quiet.standing(view)
    quiet.standing(view)
    nothing = replace(view, best=None, tried=4, plan=replace(plan, trials=6, left_s=math.inf))
    quiet.standing(nothing)
    # 7 trials of 4 s and 20 s, 48 s at 0.01 a second; 44 s with one trial less.
    assert [line[6:].strip() for line in quiet.said().splitlines()] == [
        "best so far: trial 2, goodput 49.6 requests/s, 1.78 times stock, meets the goal "
        "(25% of p95 ttft <= 1s, p95 itl <= 1s not measured); "
        "left: 7 of 10 trials, 1:20 of time, about 0.48 to pay",
        "best so far: nothing has a number yet; left: 6 of 10 trials, about 0:44, "
        "about 0.44 to pay",
    ]


def test_a_confirmation_is_told_by_the_trial_that_it_confirms(reporter):
    quiet = reporter(False)
    again = TRIAL.model_copy(update={"number": 9, "parent": 3})
    quiet.trial(again, Measurement(status=Status.OK), reused=False)
    assert "trial 3 again: " in quiet.said()


def test_a_failure_is_told_by_its_class_and_reason(reporter):
    quiet = reporter(False)
    failure = Failure(failure=FailureClass.DOES_NOT_FIT, message="needs [1 GiB] more")
    quiet.trial(TRIAL, Measurement(status=Status.FAILED, failure=failure), reused=False)
    assert "trial 3: does-not-fit: needs [1 GiB] more" in quiet.said()


@pytest.mark.parametrize(
    ("bottleneck", "text"),
    [
        (Bottleneck.KV_CAPACITY, "bound by kv-capacity (high confidence)"),
        (Bottleneck.PREFIX_THRASH, "bound by prefix-thrash (high confidence)"),
        (Bottleneck.WEIGHT_BANDWIDTH, "bound by weight-bandwidth (high confidence)"),
        (Bottleneck.IDLE, "idle (high confidence)"),
        (Bottleneck.ABSTAIN, "no verdict"),
    ],
)
def test_a_verdict_has_a_headline(bottleneck, text, reporter):
    verdict = Verdict(bottleneck=bottleneck, confidence="high", evidence=(), summary="because [x]")
    quiet = reporter(False)
    quiet.verdict(verdict)
    assert f"{text}: because [x]" in quiet.said()
    assert headline(verdict)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        (
            {Bottleneck.KV_BANDWIDTH: 0.44, Bottleneck.COMPUTE: 0.36, Bottleneck.OVERHEAD: 0.2},
            "of a mean step: 44% kv-bandwidth, 36% compute, 20% overhead",
        ),
        (
            {Bottleneck.COMPUTE: 0.61, Bottleneck.KV_BANDWIDTH: 0.001},
            "of a mean step: 61% compute, 39% not told apart",
        ),
    ],
)
def test_shares_of_a_step_are_shown_with_what_is_left(shares, text, reporter):
    assert shares_text(shares) == text
    quiet = reporter(False)
    quiet.verdict(
        Verdict(
            bottleneck=Bottleneck.ABSTAIN, confidence="low", evidence=(), summary="", shares=shares
        )
    )
    assert quiet.said().splitlines()[-1].endswith(f"  {text}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.0, "1"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.9, "1,000"),
        (1370.2, "1,370"),
        (-1370.2, "-1,370"),
        (23_456_789.0, "23,500,000"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "-"),
        (0.25, "share", "25%"),
        (0.5, "1/request", "0.5 a request"),
        (3.0, "prompts", "3 prompts"),
        (3.0, "", "3"),
    ],
)
def test_an_amount_has_its_unit(value, unit, text):
    assert amount(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (Interval(estimate=2.0, low=None, high=None, unit="requests/s"), "2"),
        (Interval(estimate=2.0, low=1.5, high=2.5, unit="requests/s"), "2 (1.5 to 2.5)"),
        (Interval(estimate=9.0, low=2.5, high=None, unit="ratio"), "9 (at least 2.5)"),
        (Interval(estimate=0.0123, low=0.01, high=0.015, unit="s"), "12.3 ms (10 to 15)"),
        (Interval(estimate=1.25, low=1.0, high=1.5, unit="s"), "1.25 s (1 to 1.5)"),
    ],
)
def test_an_interval_has_its_bounds_and_times_their_unit(value, text):
    assert interval(value) == text
