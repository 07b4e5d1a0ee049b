"""Forecasts beside what was measured: in rows, and in a plot with the ranges that were told."""

import pytest
from contracts.pages import forecast, parsed

from kvtune.autotune.report.calibration_page import calibration_page
from kvtune.autotune.report.forecast_words import is_outside, measured_levers

GOODPUT, CAPACITY = "goodput_requests_per_s", "capacity_tokens"


def measured(lever, metric, told, came, *, low=None, high=None, study="night"):
    known = {"study": study, "measured": came, "measured_baseline": 1.0}
    return forecast(lever, metric, told, low=low, high=high, **known)


TOLD = (
    measured("<b>fp8</b>", GOODPUT, 1.1, 1.3, low=1.05, high=1.2),
    measured("<b>fp8</b>", CAPACITY, 2.0, 2.0, low=2.0, high=2.0),
    measured("blocks of 32", GOODPUT, 1.5, 1.4, low=1.2, high=1.6),
    forecast("quest", GOODPUT, 1.2),
)


def test_a_lever_is_a_row_with_what_was_told_and_what_came():
    found = parsed(calibration_page(TOLD))
    assert ["<b>fp8</b>", "+100% -> +100%", "-", "-", "+10% -> +30%*", "night"] in found.rows
    assert ["blocks of 32", "-", "-", "-", "+50% -> +40%", "night"] in found.rows
    assert not any("quest" in row[0] for row in found.rows), "it was not measured"
    assert found.texts["p"][0] == "4 forecasts, 3 of them measured later"


def test_marks_lie_where_they_were_told_and_measured_with_their_range():
    line, capacity, goodput = parsed(calibration_page(TOLD)).plots["Told and measured."]["data"]
    assert line["x"] == line["y"]
    assert goodput["x"] == pytest.approx([0.1, 0.5])
    assert goodput["y"] == pytest.approx([0.3, 0.4])
    assert goodput["error_x"]["array"] == pytest.approx([0.1, 0.1])
    assert goodput["error_x"]["arrayminus"] == pytest.approx([0.05, 0.3])
    assert capacity["error_x"]["array"] == [0.0]
    assert goodput["customdata"][0] == [
        "&lt;b&gt;fp8&lt;/b&gt;",
        "night",
        "+10% (+5% to +20%)",
        "+30%",
    ]


def test_errors_are_those_of_the_scores():
    found = parsed(calibration_page(TOLD))
    # (20 + 10) / 2 points; one of two within its range.
    assert ["goodput", "2", "15 points", "2", "1"] in found.rows


def test_nothing_measured_says_how_it_would_be():
    found = parsed(calibration_page(TOLD[3:]))
    assert found.of("figure") == []
    assert "A search measures them" in " ".join(found.texts["p"])


def test_what_is_told_twice_is_shown_twice_and_studies_stay_together():
    twice = [measured("a", GOODPUT, 1.1, 1.1, study=name) for name in ("y", "x", "y")]
    assert [one.study for one in measured_levers(twice)] == ["x", "y", "y"]


@pytest.mark.parametrize(
    ("low", "high", "came", "outside"),
    [(1.0, 1.2, 1.1, False), (1.0, 1.2, 1.3, True), (1.0, 1.2, 0.9, True), (None, None, 9, False)],
)
def test_outside_is_beyond_a_range_that_was_told(low, high, came, outside):
    assert is_outside(measured("a", GOODPUT, 1.1, came, low=low, high=high)) is outside


def test_levers_that_all_did_the_same_still_have_a_scale():
    (line, _) = parsed(calibration_page([measured("a", GOODPUT, 1.0, 1.0)])).plots[
        "Told and measured."
    ]["data"]
    assert line["x"][0] < 0 < line["x"][1]
