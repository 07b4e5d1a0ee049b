"""A quality report on a page: every figure, what broke, and the maps."""

import math

import pytest

from kvtune.autotune.report.figures_quality import (
    changes_figure,
    lengths_figure,
    map_figure,
    ratios_figure,
)
from kvtune.autotune.report.page import Details, Figure, KeyFigures, Table, render_page
from kvtune.autotune.report.quality_page import quality_page
from kvtune.types import Interval, NegativeSample, QualityFigure, QualityPoint, QualityReport


def interval(estimate, low, high, unit="share"):
    return Interval(estimate=estimate, low=low, high=high, unit=unit)


def figure(**changes):
    fields = {
        "suite": "needle",
        "category": "single",
        "metric": "recall",
        "unit": "share",
        "better": "higher",
        "kind": "difference",
        "limit": 0.05,
        "items": 12,
        "candidate": 0.5,
        "baseline": 0.75,
        "change": interval(-0.25, -0.5, -0.125),
        "floor": interval(0.0, -0.1, 0.1),
        "outcome": "fail",
        "because": "3 of 12 items broke",
    }
    return QualityFigure(**{**fields, **changes})


KL = figure(
    suite="fidelity",
    category="0-512",
    metric="kl",
    unit="nats",
    better="lower",
    kind="level",
    limit=0.02,
    baseline=0.0,
    candidate=0.03,
    change=interval(0.03, 0.01, 0.05, "nats"),
    floor=None,
    outcome="unclear",
    because="between 0.01 and 0.05",
)


def point(length, depth=None, candidate=1.0, baseline=1.0, suite="needle", category="single"):
    place = {"length_tokens": length} | ({} if depth is None else {"depth": depth})
    return QualityPoint(
        suite=suite,
        category=category,
        item=f"i{length}",
        place=place,
        candidate=candidate,
        baseline=baseline,
    )


def report(**changes):
    fields = {
        "outcome": "fail",
        "figures": (figure(), KL, figure(category="", outcome="unclear")),
        "samples": (
            NegativeSample(
                suite="needle",
                category="single",
                item="i1",
                asked="<script>alert(1)</script>",
                candidate="garbage <b>",
                baseline="7194",
                detail="expected 7194",
            ),
        ),
        "points": (
            point(300, 0.0),
            point(300, 0.5, candidate=0.0),
            point(600, 0.5),
            point(512, suite="fidelity", candidate=0.01),
            point(1024, suite="fidelity", candidate=0.05),
        ),
        "skipped": {"tools": "no items"},
        "model": "m",
        "baseline": "stock settings",
        "candidate": "--kv-cache-dtype fp8",
        "versions": {"engine": "0.32"},
        "wall_s": 12.0,
    }
    return QualityReport(**{**fields, **changes})


def blocks(page, kind):
    return [block for part in page.sections for block in part.blocks if isinstance(block, kind)]


def test_the_outcome_comes_first_and_every_figure_is_in_a_table():
    page = quality_page(report())
    assert page.sections[0].heading == "Outcome"
    (key,) = blocks(page, KeyFigures)
    assert (key.figures[0].value, key.figures[0].tone) == ("fail", "bad")
    rows = [row for table in blocks(page, Table)[:-1] for row in table.rows]
    assert [row.cells[0] for row in rows] == ["single", "all", "0-512"]
    assert rows[0].cells[-1] == "3 of 12 items broke"
    assert [section.heading for section in page.sections[1:3]] == ["needle", "fidelity"]


def test_a_figure_that_only_informs_looks_like_it_and_is_not_counted():
    page = quality_page(report(figures=(figure(), figure(category="side", decides=False))))
    (key,) = blocks(page, KeyFigures)
    assert key.figures[1].value == "1"
    deciding, informing = blocks(page, Table)[0].rows
    assert (deciding.cells[2], deciding.tone) == ("fail", "bad")
    assert (informing.cells[2], informing.tone) == ("fail (informs only)", "muted")


def test_answers_stand_side_by_side_and_are_escaped():
    page = quality_page(report())
    (details,) = blocks(page, Details)
    assert [excerpt.text for excerpt in details.excerpts[:2]] == ["7194", "garbage <b>"]
    html = render_page(page)
    assert "<script>alert(1)" not in html
    assert "garbage &lt;b&gt;" in html


def test_a_report_without_figures_is_a_page_too():
    page = quality_page(report(figures=(), samples=(), points=(), outcome="unclear"))
    assert "tools was not judged: no items" in render_page(page)


def test_changes_stand_beside_limit_and_floor_in_points():
    drawn = changes_figure([figure()]).plot["data"]
    floor, candidate, limit = drawn
    assert candidate["x"] == [-25.0]
    assert candidate["error_x"]["arrayminus"] == [25.0]
    assert candidate["error_x"]["array"] == [12.5]
    assert limit["x"] == [-5.0]
    assert floor["error_x"]["array"] == [10.0]


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"better": "lower"}, 5.0),
        ({"kind": "level", "limit": 0.9, "baseline": 1.0}, -10.0),
        ({"kind": "level", "limit": 0.02, "unit": "nats", "baseline": 0.0}, 0.02),
    ],
)
def test_limits_stand_where_a_change_would_break_them(changes, at):
    assert changes_figure([figure(**changes)]).plot["data"][2]["x"] == [pytest.approx(at)]


def test_a_map_shows_both_sides_and_leaves_unknown_places_empty():
    drawn = map_figure("needle", report().points[:3])
    baseline, candidate = drawn.plot["data"]
    assert baseline["x"] == ["300", "600"]
    assert baseline["y"] == ["0%", "50%"]
    assert candidate["z"] == [[1.0, None], [0.0, 1.0]]
    assert "1 of 3 places are lower" in drawn.description


def test_each_category_has_maps_of_its_own():
    points = [
        point(300, 0.0),
        point(300, 0.0, candidate=0.0, category="multi-key"),
        point(600, 0.0, candidate=0.5, category="multi-key"),
    ]
    plot = map_figure("needle", points).plot
    single, other = plot["data"][1], plot["data"][3]
    assert single["z"] == [[1.0, None]]
    assert other["z"] == [[0.0, 0.5]]
    assert (single["yaxis"], other["yaxis"]) == ("y2", "y4")
    assert plot["layout"]["yaxis3"]["title"]["text"] == "multi-key"
    above, below = plot["layout"]["yaxis"]["domain"], plot["layout"]["yaxis3"]["domain"]
    assert above[0] > below[1]


def length(ratio, again, category="greedy"):
    return QualityPoint(
        suite="length-shift",
        category=category,
        item=f"i{ratio}",
        candidate=math.log(40 * ratio),
        baseline=math.log(40),
        again=None if again is None else math.log(40 * again),
    )


def test_ratios_of_lengths_stand_beside_what_the_baseline_differs_from_itself():
    points = [length(2.0, 1.25), length(0.5, 1.0), length(1.0, None)]
    control, candidate, mark = ratios_figure("length-shift", points).plot["data"]
    assert candidate["x"] == pytest.approx([0.5, 1.0, 2.0])
    assert candidate["y"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert control["x"] == pytest.approx([1.0, 1.25])
    assert mark["x"] == [1.5, 1.5]
    words = ratios_figure("length-shift", points).description
    assert "candidate: median 1.00, nine in ten up to 1.80, 33% over 1.5" in words


def test_ratios_are_drawn_by_category_and_without_a_control_where_there_is_none():
    points = [length(2.0, None), length(0.5, None, "sampled")]
    names = [trace["name"] for trace in ratios_figure("length-shift", points).plot["data"]]
    assert names == ["greedy, candidate", "sampled, candidate", "1.5 times as long"]
    assert ratios_figure("length-shift", []) is None


def test_a_suite_of_lengths_is_drawn_as_ratios():
    lengths = figure(
        suite="length-shift",
        category="greedy",
        metric="length",
        unit="nats",
        better="lower",
        change=interval(0.1, 0.0, 0.2, "nats"),
        floor=None,
    )
    page = quality_page(report(figures=(lengths,), points=(length(2.0, 1.0),)))
    captions = [found.caption for found in blocks(page, Figure)]
    assert any(caption.startswith("Lengths of length-shift answers") for caption in captions)


def test_places_without_depth_make_no_map_but_a_line_by_length():
    points = report().points[3:]
    assert map_figure("fidelity", points) is None
    drawn = lengths_figure(points, KL)
    assert drawn.plot["data"][1]["y"] == [0.01, 0.05]
    assert "0.02" in drawn.description
    assert lengths_figure(points[:1], KL) is None


def test_figures_are_drawn_for_each_metric_with_maps_and_lines():
    captions = [found.caption for found in blocks(quality_page(report()), Figure)]
    assert len(captions) == 4
    assert any("by place in the context" in caption for caption in captions)
