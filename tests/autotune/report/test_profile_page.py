"""What a profile's page holds: everything that is known, and why the rest is not."""

import pytest
from contracts.pages import forecast, parsed, profile_view, seen, workload

from kvtune.autotune.report.profile_page import profile_page
from kvtune.types import Bottleneck, Verdict

EVERY = (
    forecast("fp8", "goodput_requests_per_s", 1.14, low=1.05, high=1.3),
    forecast("fp8", "capacity_tokens", 2.0),
    forecast("quest", "goodput_requests_per_s", 0.9, served_by="reference"),
    forecast("offload", "goodput_requests_per_s", None),
)


@pytest.fixture(scope="module")
def page():
    return parsed(profile_page(profile_view(forecasts=EVERY)))


def test_a_model_on_this_disk_is_called_by_its_last_part():
    found = parsed(profile_page(profile_view(model="/somewhere/deep/small")))
    assert found.texts["h1"] == ["Profile of small"]
    assert ["model", "/somewhere/deep/small"] in found.rows


def test_each_section_is_there_once(page):
    assert page.texts["h2"] == [
        "Verdict",
        "Where a step's time goes",
        "Evidence",
        "Requests",
        "Prefix reuse",
        "Roofline",
        "Forecasts",
        "Not known",
        "Server",
    ]


@pytest.mark.parametrize(
    ("bottleneck", "label", "value", "note"),
    [
        (Bottleneck.KV_CAPACITY, "bound by", "kv-capacity", "medium confidence"),
        (Bottleneck.IDLE, "the server is", "idle", "medium confidence"),
        (Bottleneck.ABSTAIN, "verdict", "none", "too little is known"),
    ],
)
def test_the_verdict_comes_first(bottleneck, label, value, note):
    verdict = Verdict(
        bottleneck=bottleneck,
        confidence="medium",
        evidence=(),
        summary="So it is.",
        next_experiment="Try more.",
    )
    found = parsed(profile_page(profile_view(verdict=verdict)))
    assert found.texts["dt"][0] == label
    assert found.texts["dd"][:2] == [value, note]
    assert {"So it is.", "Next: Try more."} <= set(found.texts["p"])


def test_what_was_measured_follows_the_verdict(page):
    assert dict(zip(page.texts["dt"][1:3], page.texts["dd"][2:4], strict=True)) == {
        "goodput": "1.5 requests/s",
        "p95 time to first token": "250 ms",
    }


def test_the_roofline_has_two_ceilings_that_meet_at_the_ridge(page):
    plot = page.plots["Roofline."]
    memory, arithmetic, *work = plot["data"]
    assert memory["x"][1] == arithmetic["x"][0] == 20
    assert memory["y"][1] == pytest.approx(arithmetic["y"][0])
    assert memory["y"][0] == pytest.approx(memory["x"][0] * 50e9)
    assert [one["name"] for one in work] == ["decode", "prefill", "mean step"]
    for one in work:
        (x,), (y,) = one["x"], one["y"]
        assert memory["x"][0] < x < arithmetic["x"][1]
        assert y <= min(1e12, x * 50e9)
    assert plot["layout"]["xaxis"]["type"] == plot["layout"]["yaxis"]["type"] == "log"


def test_work_that_was_not_timed_is_hollow_and_on_its_roof():
    window = seen(step_time=None)
    plot = parsed(profile_page(profile_view(window))).plots["Roofline."]
    decode = next(one for one in plot["data"] if one["name"] == "decode")
    assert decode["marker"]["symbol"] == "circle-open"
    assert decode["y"][0] == pytest.approx(decode["x"][0] * 50e9)


def test_the_parts_of_a_step_are_told_in_time_and_share(page):
    plot = page.plots["A mean step of 100 ms."]
    (bars,) = plot["data"]
    assert sum(bars["x"]) == pytest.approx(1)
    assert bars["text"][bars["y"].index("reading KV")] == "44 ms, 44%"
    assert ["in any case", "20 ms (18 ms to 22 ms)"] in page.rows


def test_reuse_is_shown_beside_what_was_served(page):
    possible, served = page.plots["Prefixes that come again."]["data"]
    assert dict(zip(possible["x"], possible["y"], strict=True)) == {"16": 0.8, "128": 0.5}
    assert served["y"] == [0.4, 0.4]
    colours = possible["marker"]["color"]
    assert colours[0] != colours[1], "the server's own blocks stand out"
    assert ["128 (the server)", "50%"] in page.rows


def test_forecasts_have_their_ranges_and_the_largest_is_on_top(page):
    engine, reference = page.plots["Forecast change of goodput."]["data"]
    assert engine["y"] == ["fp8"]
    assert engine["x"] == pytest.approx([0.14])
    assert engine["error_x"]["array"] == pytest.approx([0.16])
    assert engine["error_x"]["arrayminus"] == pytest.approx([0.09])
    assert reference["y"] == ["quest"]
    order = page.plots["Forecast change of goodput."]["layout"]["yaxis"]["categoryarray"]
    assert order == ["quest", "fp8"], "from below"


def test_a_range_may_begin_where_nothing_is_left():
    told = forecast("half", "goodput_requests_per_s", 0.5, low=0.0, high=0.8)
    found = parsed(profile_page(profile_view(forecasts=(told,))))
    (bar,) = found.plots["Forecast change of goodput."]["data"]
    assert bar["error_x"]["arrayminus"] == pytest.approx([0.5])


def test_a_lever_without_a_figure_keeps_its_reason(page):
    assert ["offload", "-", "-", "-", "-"] in page.rows
    assert ["offload", "offload does it"] in page.rows


def test_levers_that_the_engine_serves_come_first_and_those_that_help_before_others(page):
    levers = [row for row in page.rows if len(row) == 5 and row[0] in {"fp8", "quest", "offload"}]
    assert [row[0] for row in levers] == ["fp8", "offload", "quest"]
    assert levers[0] == ["fp8", "+100%", "-", "-", "+14% (+5% to +30%)"]


def test_a_reason_that_holds_for_many_levers_stands_once():
    same = [forecast(name, "goodput_requests_per_s", 1.0, reason="so") for name in ("a", "b")]
    rows = parsed(profile_page(profile_view(forecasts=same))).rows
    assert [row for row in rows if row[-1] == "so"] == [["a, b", "so"]]


def test_only_evidence_with_a_value_is_a_row_and_the_rest_is_named(page):
    assert all(row[1] != "-" for row in page.rows if len(row) == 6 and row[0].endswith("_share"))
    assert any(text.startswith("Not known: ") for text in page.texts["p"])


def test_without_ceilings_a_model_and_a_load_the_page_says_what_would_tell():
    window = seen(step_time=None, weight_bytes=None, peak_flops_per_s=None, peak_bytes_per_s=None)
    bare = workload(fingerprint=None, prompts=None, answers=None, arrivals=None)
    view = profile_view(window, None, view=bare, ceilings=None, device=None, metrics={})
    found = parsed(profile_page(view))
    lost = {text.partition(":")[0] for text in found.texts["li"]}
    assert {"roofline", "prompt lengths", "arrivals", "forecasts"} <= lost
    assert "Forecasts" not in found.texts["h2"]
    assert any("--model" in text for text in found.texts["li"] if text.startswith("roofline"))


def test_names_of_levers_and_models_are_no_markup():
    told = (forecast("<b>lever</b>", "goodput_requests_per_s", 1.2, reason="<i>why</i> " * 30),)
    found = parsed(profile_page(profile_view(forecasts=told, model="<script>x</script>")))
    assert found.texts["h1"] == ["Profile of <script>x</script>"]
    (bars,) = found.plots["Forecast change of goodput."]["data"]
    assert bars["y"] == ["&lt;b&gt;lever&lt;/b&gt;"]
    lines = bars["customdata"][0].split("<br>")
    assert len(lines) > 3, "a hover label does not break lines itself"
    assert "<i>" not in bars["customdata"][0]
