"""The front of a study on its page and for programs."""

import json

import pytest
from contracts.studies import MIB, measured, of

from kvtune.autotune.report.page import Table
from kvtune.autotune.report.study_evidence import tradeoff_blocks
from kvtune.autotune.report.study_front import front_blocks
from kvtune.autotune.report.study_json import study_json
from kvtune.autotune.report.study_view import study_view
from kvtune.store.database import open_store
from kvtune.types import Decision, Front, FrontPoint, Interval


def figures(goodput, mib):
    return {
        "goodput": Interval(estimate=goodput, low=goodput - 1, high=goodput + 1, unit="requests/s"),
        "memory": Interval(estimate=mib * MIB, low=None, high=None, unit="bytes"),
    }


FRONT = Front(
    objectives=("goodput", "memory"),
    points=(
        FrontPoint(trial=1, figures=figures(9.0, 64), no_better_than=(0,), doubt="a doubt"),
        FrontPoint(
            trial=0,
            figures=figures(5.0, 32),
            confirmed=Interval(estimate=4.5, low=4.25, high=4.75, unit="requests/s"),
        ),
    ),
    ends={"goodput": 1, "memory": 0},
    beaten={2: 1},
    reasons=("a reason",),
)


@pytest.fixture
def view(tmp_path):
    """A study whose decision has the front, with trial 2 recommended."""
    with open_store(tmp_path / "s.db") as store:
        trials = [({}, measured(5.0)), ({"block-size": 32}, measured(9.0))]
        seen = of(store, *trials, ({"block-size": 64}, measured(8.0)))
        store.save_decision(
            seen.study, Decision(outcome="winner", recommended=2, baseline=0, front=FRONT)
        )
        yield study_view(store, seen.study)


def test_the_front_has_a_row_for_each_of_its_trials(view):
    table, *said = front_blocks(view)
    assert isinstance(table, Table)
    assert [row.cells for row in table.rows] == [
        (
            "1",
            "9 (8 to 10)",
            "64 MiB",
            "-",
            "block-size 32",
            "best goodput; beyond noise no better than 0; a doubt",
        ),
        ("0", "5 (4 to 6)", "32 MiB", "4.5 (4.25 to 4.75)", "stock defaults", "best memory"),
    ]
    assert said == ["trial 2 is recommended by goodput alone: trial 1 beats it", "a reason"]


def test_it_comes_before_the_figures_of_what_is_traded(view):
    assert tradeoff_blocks(view)[0] == front_blocks(view)[0]


def test_without_a_front_the_page_has_none(tmp_path):
    with open_store(tmp_path / "s.db") as store:
        assert front_blocks(of(store, ({}, measured(5.0)))) == ()


def test_an_empty_front_is_said_to_be(tmp_path):
    empty = Front(objectives=("goodput",), points=(), reasons=("a reason",))
    with open_store(tmp_path / "s.db") as store:
        seen = of(store, ({}, measured(5.0)))
        store.save_decision(
            seen.study, Decision(outcome="infeasible", recommended=0, baseline=0, front=empty)
        )
        assert front_blocks(study_view(store, seen.study)) == ("a reason",)


def test_programs_get_it_whole(view):
    assert Front.model_validate(json.loads(study_json(view))["decision"]["front"]) == FRONT
