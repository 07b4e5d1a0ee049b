"""How a search ended, on stdout."""

import pytest

from kvtune.autotune.cli.results import figures_table
from kvtune.types import Decision, Interval, Outcome

FIGURES = {"ttft_p95_s": Interval(estimate=0.9, low=None, high=None, unit="s")}


@pytest.mark.parametrize(
    ("outcome", "recommended", "titles"),
    [
        (Outcome.WINNER, 3, ["", "recommended", "stock defaults"]),
        (Outcome.INFEASIBLE, 3, ["", "closest", "stock defaults"]),
        (Outcome.INFEASIBLE, 0, ["", "stock defaults"]),
    ],
)
def test_what_misses_the_goal_is_called_closest_and_not_recommended(outcome, recommended, titles):
    decision = Decision(
        outcome=outcome,
        recommended=recommended,
        baseline=0,
        figures=FIGURES,
        baseline_figures=FIGURES,
    )
    assert [column.header for column in figures_table(decision).columns] == titles
