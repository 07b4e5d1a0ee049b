"""A study on a page: every part of the evidence, and something sensible where there is none."""

import json

import pytest
from contracts.pages import parsed
from contracts.store_values import a_config, a_profile
from contracts.studies import MIB, add, add_round, failed, figure, measured, new_study, of, report

from kvtune.autotune.report.page import Details, Figure, KeyFigures, Table, render_page
from kvtune.autotune.report.study_json import study_json
from kvtune.autotune.report.study_page import study_page
from kvtune.autotune.report.study_view import study_view
from kvtune.store.database import open_store
from kvtune.types import (
    Bottleneck,
    Decision,
    Evidence,
    FailureClass,
    Forecast,
    Goal,
    Interval,
    Measurement,
    Status,
)

FP8 = {"kv-cache-dtype": "fp8"}
EVIL = "<script>alert(1)</script>"
SECTIONS = [
    "Decision",
    "Winner against stock",
    "Decision trail",
    "Trials",
    "Convergence",
    "Trade-offs",
    "Settings",
    "Limits",
    "Failures",
    "Price of harm",
    "Verdict",
    "Forecasts",
    "Quality",
    "How it was measured",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("store") / "s.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(store):
    """A study that has everything: knobs, failures, answers, forecasts, rounds, a file."""
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0, ttft_s=0.9))
    number = 1
    for size in (32, 64):
        for width in (8, 16):
            for memory in (64, 128):
                arguments = {
                    "block-size": size,
                    "max-num-seqs": width,
                    "kv-cache-memory-bytes": memory * MIB,
                }
                goodput = 3.0 + (size == 32) + width / 100
                add(store, study, number, arguments, measured(goodput, memory_bytes=memory * MIB))
                number += 1
    add(store, study, 9, {"block-size": 16}, failed(FailureClass.OUT_OF_MEMORY, log="line 1"))
    add(store, study, 10, FP8, measured(5.0, warnings=("the machine was slow",)))
    worse = figure(category="0-512", outcome="fail", candidate=0.05)
    store.save_quality_report(report("fail", worse, figure()), study=study, trial=10)
    told = Forecast(
        lever="block-size 32",
        arguments={"block-size": 32, "max-num-seqs": 8, "kv-cache-memory-bytes": 64 * MIB},
        metric="goodput_requests_per_s",
        unit="requests/s",
        baseline=2.0,
        predicted=3.0,
        ratio=Interval(estimate=1.5, low=1.2, high=1.8, unit="ratio"),
        reason="less is wasted",
    )
    store.save_forecasts(study.name, [told])
    pair = {"goodput_requests_per_s": (4.0, 2.0)}
    store.score_forecasts(study.name, told.arguments, pair, study=study.name, trial=1)
    for of_round in (1, 2, 3):
        add_round(store, study, 9 + 2 * of_round, 0, {}, 2.0 + of_round / 10, of_round)
        ours = 4.0 + of_round / 10
        add_round(store, study, 10 + 2 * of_round, 1, told.arguments, ours, of_round)
    ratio = Interval(estimate=1.9, low=1.8, high=2.0, unit="ratio", repeats=3)
    value = Interval(estimate=4.2, low=4.0, high=4.4, unit="requests/s", repeats=3)
    stock = Interval(estimate=2.2, low=2.0, high=2.4, unit="requests/s", repeats=3)
    slow = Interval(estimate=0.9, low=0.85, high=0.95, unit="s", repeats=3)
    decision = Decision(
        outcome="winner",
        recommended=1,
        baseline=0,
        ties=(2,),
        figures={"goodput_requests_per_s": value},
        baseline_figures={"goodput_requests_per_s": stock, "ttft_p95_s": slow},
        gain_ratio=ratio,
        reasons=("above the stock defaults beyond noise",),
        rejected={3: "not among those that were confirmed"},
    )
    store.save_decision(study, decision)
    config = a_config(study.name).model_copy(update={"trial": 1})
    store.save_emitted(config, "shell", "deploy/", {"serve.sh": "abcdef0123456789"})
    return study_view(store, study)


def blocks(view, heading, kind):
    section = next(each for each in study_page(view).sections if each.heading == heading)
    return [block for block in section.blocks if isinstance(block, kind)]


def texts(view, heading):
    return " ".join(blocks(view, heading, str))


def key_figures(view, heading="Decision"):
    return {each.label: each.value for each in blocks(view, heading, KeyFigures)[0].figures}


def cells(view, heading):
    return [row.cells for table in blocks(view, heading, Table) for row in table.rows]


def test_a_page_has_every_part_in_the_order_of_reading(whole):
    page = parsed(study_page(whole))
    assert page.texts["h2"] == SECTIONS
    assert page.of("link") == []
    assert all("src" not in attributes for attributes in page.of("script"))


def test_the_decision_comes_first_in_words_with_what_to_run(whole):
    shown = key_figures(whole)
    assert shown["outcome"] == "winner"
    assert shown["recommended trial"] == "1"
    assert shown["times stock"] == "1.9"
    assert shown["trials"] == "11"
    notes = [each.note for each in blocks(whole, "Decision", KeyFigures)[0].figures]
    assert notes[-1] == "1 failed; then 3 rounds of confirmation"
    said = texts(whole, "Decision")
    assert "run block-size 32, max-num-seqs 8, kv-cache-memory-bytes 64 MiB." in said
    assert "Goodput is 1.9 (1.8 to 2) times that of the stock defaults." in said
    assert "It cannot be told from trial 2." in said
    assert f"kvtune serve --study '{whole.study.name}'" in said
    assert ("block-size", "32", "block-size may help") in cells(whole, "Decision")
    assert cells(whole, "Decision")[-1][:3] == ("deploy/serve.sh", "shell", "abcdef012345")
    (details,) = blocks(whole, "Decision", Details)
    assert "block-size: 32" in details.excerpts[0].text


def test_rounds_are_points_and_means_have_intervals(whole):
    (drawn,) = blocks(whole, "Winner against stock", Figure)
    rounds, means = drawn.plot["data"]
    assert rounds["y"] == [2.1, 2.2, 2.3, 4.1, 4.2, 4.3]
    assert rounds["x"] == sorted(rounds["x"])
    assert means["y"] == pytest.approx([2.2, 4.2])
    assert means["error_y"]["array"] == pytest.approx([0.2484, 0.2484], abs=1e-3)
    assert drawn.plot["layout"]["xaxis"]["ticktext"] == ["stock", "trial 1"]


def test_figures_over_a_limit_are_marked(store):
    view = of(store, ({}, measured(2.0, ttft_s=0.9)))
    figures = {
        "ttft_p50_s": Interval(estimate=0.9, low=None, high=None, unit="s"),
        "ttft_p95_s": Interval(estimate=0.9, low=None, high=None, unit="s"),
    }
    decision = Decision(
        outcome="infeasible", recommended=0, baseline=0, figures=figures, baseline_figures=figures
    )
    store.save_decision(view.study, decision)
    (table,) = blocks(study_view(store, view.study), "Winner against stock", Table)
    assert [(row.cells, row.tone) for row in table.rows] == [
        (("ttft_p50_s", "900 ms", "-"), ""),
        (("ttft_p95_s", "900 ms", "800 ms"), "bad"),
    ]


def test_each_figure_says_how_many_how_cold_and_which_engine(whole):
    drawn = [
        block
        for section in study_page(whole).sections
        for block in section.blocks
        if isinstance(block, Figure)
    ]
    captions = [each.caption for each in drawn]
    assert captions == [
        "Finalists beside the stock defaults.",
        "Best so far, by trial.",
        "Best so far, by seconds.",
        "Goodput against memory.",
        "Goodput against quality.",
        "What each setting explains by itself.",
        "All trials at once.",
        "How near trials came to the limits.",
        "Told and measured.",
        "kl of fidelity, by category, with 90% intervals.",
    ]
    for each in drawn:
        assert "n = " in each.description, each.caption
        assert "vllm 0.11.0" in each.description, each.caption
    for each in drawn[:-1]:
        assert "prefix cache cold" in each.description, each.caption


def test_failed_trials_are_crosses_without_a_value(whole):
    drawn = blocks(whole, "Convergence", Figure)[0]
    crosses = next(each for each in drawn.plot["data"] if each["name"] == "failed")
    assert crosses["y"] == [0.0]
    assert crosses["marker"]["symbol"] == ["x"]
    assert "Crosses at 0 are trials without a number" in drawn.description
    best = next(each for each in drawn.plot["data"] if each["name"] == "best so far")
    assert max(best["y"]) == pytest.approx(4.16)


def test_parallel_lines_show_the_recommended_trial_above_the_others(whole):
    drawn = blocks(whole, "Settings", Figure)[1]
    widths = {each["name"]: each["line"]["width"] for each in drawn.plot["data"]}
    assert max(widths, key=widths.get) == "trial 1"
    assert len(widths) == len(whole.measured)
    words = [each["text"] for each in drawn.plot["layout"]["annotations"]]
    assert {"64 MiB", "128 MiB", "fp8", "32", "64"} <= set(words)


def test_failures_are_counted_and_told_with_their_log(whole):
    assert key_figures(whole, "Failures") == {"out-of-memory": "1"}
    assert cells(whole, "Failures") == [("9", "block-size 16", "it died", "read the log")]
    assert blocks(whole, "Failures", Details)[0].excerpts[0].text == "line 1"


def test_each_rung_has_its_price(whole):
    rows = cells(whole, "Price of harm")
    assert [row[0] for row in rows] == ["L0", "L1", "L2"]
    assert rows[2][-1] == "may not be shipped"
    assert "too much" in rows[2][5]


def test_quality_is_told_by_category_with_the_command_for_all_of_it(whole):
    assert f"kvtune history quality {whole.reports[0].id[:8]}" in texts(whole, "Quality")
    assert [row[:2] for row in cells(whole, "Quality")] == [
        ("fidelity/0-512 kl", "fail"),
        ("fidelity/all kl", "pass"),
    ]


def test_the_figures_that_only_inform_are_told_for_all_items_together(store):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    informing = {"suite": "tools", "metric": "call", "decides": False}
    found = (figure(), figure(category="chat", **informing), figure(**informing))
    store.save_quality_report(report("pass", *found), study=view.study, trial=1)
    rows = cells(study_view(store, view.study), "Quality")
    assert [row[0] for row in rows] == ["fidelity/all kl", "tools/all call"]


def test_warnings_name_the_trials_that_had_them(whole):
    assert ("10", "the machine was slow") in cells(whole, "How it was measured")


def rendered(view):
    json.loads(study_json(view))
    return parsed(study_page(view))


def test_a_failed_baseline_makes_a_page_that_says_why(store):
    view = of(store, ({}, failed(message="no room", fix="take less")))
    store.save_decision(
        view.study,
        Decision(outcome="nothing-measured", recommended=None, baseline=0, reasons=("no trial",)),
    )
    view = study_view(store, view.study)
    page = rendered(view)
    assert page.texts["h2"] == SECTIONS
    assert "no trial gave a number" in texts(view, "Decision")
    assert "Nothing was confirmed" in texts(view, "Winner against stock")
    assert ("0", "stock defaults", "no room", "take less") in cells(view, "Failures")


def test_a_search_that_was_killed_makes_a_page_without_a_decision(store):
    view = of(store, ({}, measured(2.0)), ({"block-size": 32}, measured(3.0)), ({"a": 1}, None))
    page = rendered(view)
    assert page.texts["h2"] == SECTIONS
    assert key_figures(view)["outcome"] == "no decision yet"
    assert "goes on where it stopped" in texts(view, "Decision")
    assert "told from 8 measured trials on" in texts(view, "Settings")


@pytest.mark.parametrize("trials", [(), (({}, measured(2.0)),), (({}, None),)])
def test_a_study_of_at_most_one_trial_makes_a_page(store, trials):
    assert rendered(of(store, *trials)).texts["h2"] == SECTIONS


def test_without_limits_quality_and_failures_the_page_says_so(store):
    view = of(store, ({}, measured(2.0)), ({"a": 1}, measured(3.0)), goal=Goal())
    rendered(view)
    assert "has no limits" in texts(view, "Limits")
    assert "No quality suite was asked" in texts(view, "Quality")
    assert "No trial failed" in texts(view, "Failures")
    assert "one size in all trials" in texts(view, "Trade-offs")


def test_an_infeasible_goal_shows_the_closest_trial_and_no_command(store):
    view = of(store, ({}, measured(2.0, ttft_s=0.9)))
    store.save_decision(view.study, Decision(outcome="infeasible", recommended=0, baseline=0))
    view = study_view(store, view.study)
    assert key_figures(view)["closest trial"] == "0"
    assert "kvtune serve" not in texts(view, "Decision")


def test_a_baseline_that_is_kept_is_said_to_be(store):
    view = of(store, ({}, measured(2.0)))
    store.save_decision(view.study, Decision(outcome="keep-baseline", recommended=0, baseline=0))
    said = texts(study_view(store, view.study), "Decision")
    assert "stay with the stock defaults" in said


def test_a_goodput_that_is_always_zero_can_be_drawn(store):
    trials = [({"a": number}, measured(0.0, ttft_s=9.0)) for number in range(9)]
    rendered(of(store, ({}, measured(0.0, ttft_s=9.0)), *trials))


def test_a_figure_that_is_no_number_is_not_drawn(store):
    endless = Measurement(
        status=Status.OK,
        metrics={"goodput_requests_per_s": (1.0,), "ttft_p95_s": (float("inf"),)},
    )
    view = of(store, ({}, measured(2.0)), ({"a": 1}, endless))
    assert rendered(view).texts["h2"] == SECTIONS


def test_nothing_from_outside_becomes_markup(store):
    study = new_study(store)
    evil = {"block-size": EVIL}
    add(store, study, 0, {}, measured(2.0, warnings=(EVIL,)))
    add(store, study, 1, evil, measured(4.0))
    add(store, study, 2, {"a": EVIL}, failed(message=EVIL, fix=EVIL, log=f"</pre>{EVIL}"))
    add_round(store, study, 3, 0, {}, 2.0, of_round=1)
    add_round(store, study, 4, 1, evil, 4.0, of_round=1)
    decision = Decision(
        outcome="winner", recommended=1, baseline=0, reasons=(EVIL,), rejected={2: EVIL}
    )
    store.save_decision(study, decision)
    text = render_page(study_page(study_view(store, study)))
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    drawn = parsed(study_page(study_view(store, study))).plots
    assert "<script" not in json.dumps(list(drawn.values()))


def test_the_same_findings_are_there_for_a_program(whole):
    found = json.loads(study_json(whole))
    assert found["decision"]["recommended"] == 1
    assert found["config"]["trial"] == 1
    assert [each["trial"] for each in found["confirmation"]] == [0, 1]
    assert found["confirmation"][1]["rounds"] == {"1": 4.1, "2": 4.2, "3": 4.3}
    assert [each["kind"] for each in found["trail"]][-2:] == ["decide", "emit"]
    assert found["importance"][0]["name"] == "block-size"
    assert found["failures"]["out-of-memory"][0]["trial"] == 9
    assert [each["rung"] for each in found["prices"]] == ["L0", "L1", "L2"]
    assert found["points"][9]["standing"] == "failed"
    assert found["points"][9]["value"] is None
    assert found["forecast_scores"][0]["measured"] == 1
    assert "points" not in found["quality"][0]["report"]


@pytest.mark.parametrize(
    ("bottleneck", "label", "value"),
    [
        ("kv-capacity", "stock is bound by", "kv-capacity"),
        ("idle", "stock is", "idle"),
        ("abstain", "verdict on stock", "none"),
    ],
)
def test_the_verdict_on_stock_stands_beside_the_decision(store, bottleneck, label, value):
    # A profile is known by its figures, so that each study here has others.
    metrics = {"goodput_requests_per_s": (2.0,), "ttft_p95_s": (len(bottleneck) / 1e3,)}
    profile = a_profile()
    verdict = profile.verdict.model_copy(update={"bottleneck": Bottleneck(bottleneck)})
    store.save_profile(profile.model_copy(update={"metrics": metrics, "verdict": verdict}))
    view = of(store, ({}, measured(2.0, metrics=metrics)))
    assert key_figures(view)[label] == value


def test_the_verdict_is_told_with_what_it_rests_on(store):
    metrics = {"goodput_requests_per_s": (2.0,), "ttft_p95_s": (0.0421,)}
    profile = a_profile()
    rows = (
        Evidence(
            metric="preemptions",
            value=0.5,
            threshold=0.1,
            unit="1/request",
            holds=True,
            says="requests lack KV blocks",
            source="counters",
        ),
        Evidence(
            metric="kv_reads_share",
            value=None,
            threshold=0.5,
            unit="share",
            holds=None,
            says="reads take long",
            source="probe",
        ),
    )
    verdict = profile.verdict.model_copy(update={"evidence": rows})
    store.save_profile(profile.model_copy(update={"metrics": metrics, "verdict": verdict}))
    view = of(store, ({}, measured(2.0, metrics=metrics)))
    assert texts(view, "Verdict") == (
        "Bound by kv-capacity (high confidence). it is full Not known: kv_reads_share."
    )
    (row,) = cells(view, "Verdict")
    assert row == (
        "preemptions",
        "0.5 a request",
        "0.1 a request",
        "yes",
        "requests lack KV blocks",
        "counters",
    )
    assert "was not profiled" in texts(of(store, ({}, measured(2.0))), "Verdict")


@pytest.mark.parametrize(
    ("bounds", "repeats", "note"),
    [
        ((1.25, 1.75), 3, "95%: 1.25 to 1.75"),
        ((1.25, None), 3, "95%: at least 1.25"),
        ((None, None), 3, "too few good requests, no interval"),
        ((None, None), 1, "measured once, no interval"),
    ],
)
def test_a_gain_is_told_with_the_bounds_that_it_has(tmp_path, bounds, repeats, note):
    low, high = bounds
    ratio = Interval(estimate=1.5, low=low, high=high, unit="ratio", repeats=repeats)
    with open_store(tmp_path / "s.db") as store:
        seen = of(store, ({}, measured(2.0)), ({"block-size": 32}, measured(3.0)))
        decision = Decision(outcome="winner", recommended=1, baseline=0, gain_ratio=ratio)
        store.save_decision(seen.study, decision)
        blocks = study_page(study_view(store, seen.study)).sections[0].blocks
    (figures,) = [block for block in blocks if isinstance(block, KeyFigures)]
    assert note in [one.note for one in figures.figures if one.label == "times stock"]
