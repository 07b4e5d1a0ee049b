"""How forecasts look in the terminal."""

from __future__ import annotations

from kvtune.autotune.cli.forecasts import PLOT_COLUMNS, PLOT_ROWS, print_forecasts, scatter
from kvtune.types import Forecast, Interval


def told(lever, metric, estimate=None, served_by="engine", reason="because"):
    ratio = None
    if estimate is not None:
        ratio = Interval(estimate=estimate, low=estimate - 0.05, high=estimate + 0.05, unit="ratio")
    return Forecast(
        lever=lever,
        arguments={},
        served_by=served_by,
        metric=metric,
        unit="",
        ratio=ratio,
        reason=reason,
    )


def lever(name, goodput, reason="because", **others):
    rest = {"capacity_tokens": 2.0, "itl_p50_s": 0.9, "ttft_p50_s": None, **others}
    return [
        told(name, "goodput_requests_per_s", goodput, reason=reason),
        *(told(name, metric, value, reason=reason) for metric, value in rest.items()),
    ]


def test_best_lever_comes_first_with_its_range_and_unknown_is_no_number(capsys):
    print_forecasts([*lever("small", 1.02), *lever("large", 1.5)])
    said = capsys.readouterr().out
    assert said.index("large") < said.index("small")
    (line,) = [line for line in said.splitlines() if line.startswith("large")]
    assert line.split() == ["large", "+100%", "-10%", "-", "+50%", "(+45%", "to", "+55%)"]
    assert "- large, small: because" in said, "levers with one reason share a line"


def test_lever_without_a_figure_is_only_explained(capsys):
    reason = "not known"
    metrics = ("capacity_tokens", "itl_p50_s", "ttft_p50_s", "goodput_requests_per_s")
    print_forecasts(
        [*lever("kv", 1.1), *(told("offload", metric, reason=reason) for metric in metrics)]
    )
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if "offload" in line] == ["- offload: not known"]


def test_what_no_engine_serves_stands_apart_though_it_promises_more(capsys):
    found = [one.model_copy(update={"served_by": "reference"}) for one in lever("quest", 9.0)]
    print_forecasts([*found, *lever("kv", 1.1)])
    served, others = capsys.readouterr().out.split("If an engine served them")
    assert "kv" in served
    assert "quest" in others
    assert "quest" not in served


def test_reasons_of_what_was_asked_for_by_name_are_told_though_no_engine_serves_it(capsys):
    found = [
        one.model_copy(update={"served_by": "reference"})
        for one in (*lever("quest", 9.0, reason="reads less"), *lever("kivi", 2.0))
    ]
    print_forecasts(found, asked=["quest"])
    said = capsys.readouterr().out
    assert "- quest: reads less" in said
    assert "kivi: because" not in said


def counts(name, tokens, sequences, needs="needs a load"):
    """A lever of which only what fits is told."""
    found = [told(name, "goodput_requests_per_s", reason=needs)]
    for metric, value in (("capacity_tokens", tokens), ("sequences", sequences)):
        values = {"predicted": None if value is None else 1000 * value}
        found.append(told(name, metric, value, reason=f"{name} it").model_copy(update=values))
    return found


def test_without_a_load_what_fits_is_told_largest_first_and_once_what_the_rest_needs(capsys):
    print_forecasts([*counts("halve", 0.5, 0.5), *counts("double", 2.0, None)])
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if "%" in line]
    assert rows == [
        ["double", "2,000", "(+100%)", "-"],
        ["halve", "500", "(-50%)", "500", "(-50%)"],
    ]
    assert said.index("- double: double it") < said.index("- halve: halve it")
    assert said.count("needs a load") == 1
    assert said.splitlines()[-1] == "needs a load"


def test_perfect_forecasts_lie_on_the_dots_and_equal_ones_are_counted():
    lines = scatter([(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 1.0)]).splitlines()
    rows = [line[10:] for line in lines if "|" in line]
    assert len(rows) == PLOT_ROWS
    assert max(map(len, rows)) <= PLOT_COLUMNS
    # From 0.95 to 2.05: 1 is in the second of 17 rows from below, 2 in the second from above.
    assert rows[-2].index("2") == round(0.05 / 1.1 * 60)
    assert rows[-2].index("o") == rows[1].index("o") == round(1.05 / 1.1 * 60)
    assert sum(row.count(".") for row in rows) == PLOT_COLUMNS - 2


def test_plot_of_no_change_at_all_has_a_scale():
    assert "o" in scatter([(1.0, 1.0)])
