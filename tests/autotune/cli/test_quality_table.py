"""A report in a terminal of 80 columns."""

from kvtune.autotune.cli.quality_table import print_report
from kvtune.types import Interval, NegativeSample, QualityFigure, QualityReport


def figure(category, **changes):
    fields = {
        "suite": "needle",
        "category": category,
        "metric": "recall",
        "unit": "share",
        "better": "higher",
        "kind": "difference",
        "limit": 0.05,
        "items": 12,
        "candidate": 1.0,
        "baseline": 1.0,
        "change": Interval(estimate=0.0, low=-0.2, high=0.2, unit="share"),
        "floor": Interval(estimate=0.0, low=-0.2, high=0.2, unit="share"),
        "outcome": "unclear",
        "because": "no item broke of 12: 52 needed",
    }
    return QualityFigure(**{**fields, **changes})


KL = {
    "suite": "fidelity",
    "metric": "kl",
    "unit": "nats",
    "kind": "level",
    "better": "lower",
    "candidate": 0.01312,
    "baseline": 0.0,
    "change": Interval(estimate=0.01312, low=0.01151, high=0.01498, unit="nats"),
    "floor": Interval(estimate=0.00012, low=0.00011, high=0.00013, unit="nats"),
    "outcome": "pass",
}


def shown(capsys, *figures, **changes):
    fields = {"outcome": "unclear", "figures": figures, "candidate": "c", "baseline": "b"}
    print_report(QualityReport(**{**fields, **changes}))
    return capsys.readouterr().out


def test_a_reason_is_told_once_for_all_that_share_it(capsys):
    out = shown(capsys, figure("single"), figure("multi-key"))
    assert out.count("52 needed") == 1
    assert "needle/single recall, needle/multi-key recall" in out


def test_no_number_is_cut_in_80_columns(capsys):
    out = shown(capsys, figure("variable-tracking"), figure("512-1k", **KL))
    assert "+0.013 (0.012 to 0.015)" in out
    assert "0.00011 to 0.00013" in " ".join(out.split())
    assert "-20 to 20" in out


def test_what_broke_shows_both_answers_in_one_line_each(capsys):
    sample = NegativeSample(
        suite="needle",
        category="single",
        item="i",
        asked="q",
        candidate="[bold]gar\nbage",
        baseline="",
    )
    out = shown(capsys, samples=(sample,) * 9, skipped={"tools": "no items"})
    assert "[bold]gar bage" in out
    assert "(nothing)" in out
    assert "and 3 more" in out
    assert "not judged: tools: no items" in out
