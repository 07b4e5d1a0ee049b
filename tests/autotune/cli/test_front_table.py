"""The front as a table: who is on it, what they have, and what is to be known of them."""

import pytest
from rich.console import Console

from kvtune.autotune.cli import front_table
from kvtune.autotune.cli.front_table import print_front
from kvtune.types import Decision, Front, FrontPoint, Interval, Outcome

MIB = 1 << 20


def point(trial, goodput, kl, mib, **more):
    figures = {
        "goodput": Interval(estimate=goodput, low=goodput - 1, high=goodput + 1, unit="requests/s"),
        "quality": Interval(estimate=kl, low=kl, high=kl * 2 + 0.0004, unit="nats"),
        "memory": Interval(estimate=mib * MIB, low=None, high=None, unit="bytes"),
    }
    return FrontPoint(trial=trial, figures=figures, **more)


FRONT = Front(
    objectives=("goodput", "quality", "memory"),
    points=(
        point(7, 9.0, 0.0123, 48, no_better_than=(3,), doubt="it was not asked"),
        point(
            3,
            8.0,
            0.0,
            48,
            confirmed=Interval(estimate=7.5, low=7.25, high=7.75, unit="requests/s"),
        ),
        point(0, 5.0, 0.0, 20),
    ),
    ends={"goodput": 7, "quality": 3, "memory": 0},
    knee=None,
    unplaced={4: "its quality was not measured"},
    reasons=("a reason",),
)


@pytest.fixture
def printed(monkeypatch):
    """What the front of a decision looks like."""

    def show(front, width=80):
        console = Console(width=width, record=True, force_terminal=False)
        monkeypatch.setattr(front_table, "stdout", console)
        decision = Decision(outcome=Outcome.WINNER, recommended=3, baseline=0, front=front)
        print_front(decision, {7: "kv-cache-dtype fp8", 3: "block-size 32", 0: "stock defaults"})
        return console.export_text()

    return show


def test_every_trial_has_its_figures_and_what_is_known_of_it(printed):
    said = printed(FRONT, width=130)
    rows = {line.split()[0]: line for line in said.splitlines() if line[:1].isdigit()}
    assert "9 (8 to 10)" in rows["7"]
    assert "0.0123 (0.0123 to 0.025)" in rows["7"]
    assert "48 MiB" in rows["7"]
    assert "7.5 (7.25 to 7.75)" in rows["3"]
    assert " 0 " in rows["3"], "lossless settings diverge by nothing, by definition"
    for text in (
        "recommended, best quality",
        "beyond noise no better than 3",
        "it was not asked",
        "trial 4 has no place: its quality was not measured",
        "a reason",
    ):
        assert text in said


def test_a_recommendation_that_is_not_on_the_front_is_told(printed):
    said = printed(FRONT.model_copy(update={"points": FRONT.points[:1], "beaten": {3: 7, 0: 3}}))
    assert "- trial 3 is recommended by goodput alone: trial 7 beats it" in said


def test_it_fits_a_narrow_terminal(printed):
    assert max(map(len, printed(FRONT).splitlines()[1:-2])) <= 80


def test_an_empty_front_has_no_table_and_says_why(printed):
    said = printed(Front(objectives=("goodput", "memory"), points=(), reasons=("a reason",)))
    assert said.splitlines()[1:] == ["Front (goodput, memory): nobody is on it", "- a reason"]


def test_without_a_front_nothing_is_shown(printed):
    assert printed(None) == ""
