"""How a search ended, on stdout."""

import pytest
from contracts.policy_samples import SMOLLM2, WITH_PLUGIN, on_cpu, workload

from kvtune.autotune.cli.results import figures_table, space_of
from kvtune.autotune.limits import QualityRules
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.quality.limits import parse_limits
from kvtune.types import Decision, Harm, Interval, Outcome, Workload

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


@pytest.mark.parametrize(
    ("limits", "is_tried"), [([], True), (["needle >= -5pt"], True), (["kl <= 0.02"], False)]
)
def test_a_dry_run_knows_what_a_limit_on_scores_leaves_out(limits, is_tried, monkeypatch):
    monkeypatch.setattr("kvtune.policies.checkpoint.model_shape", lambda model: SMOLLM2)
    lengths = workload(input_p95=5000.0, output_p50=60.0)
    space = space_of(
        WITH_PLUGIN,
        on_cpu().device,
        "m",
        {},
        Workload("w", "w", (), (), lengths),
        LoadPlan(ClosedLoop(4)),
        Harm.LOSSY,
        None,
        QualityRules(parse_limits(limits)),
    )
    names = {entry.knob.name for entry in space.knobs}
    assert ("quest_budget_tokens" in names) is is_tried
    assert is_tried or space.refusals["page_selection"].startswith("'fidelity.kl <= 0.02nats'")
    assert "streaming_window_tokens" in names
