"""What counts in a report, and what comes of it."""

import random
from dataclasses import replace

import pytest
from contracts.quality_rows import KL, LEAK, RECALL, changed, figure_of, rows

from kvtune.profilers.quality.gate import judge, report
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, Limit
from kvtune.profilers.quality.suite import QualityMetric


def test_a_loss_sure_alone_is_not_sure_among_many_figures():
    values = changed(8, 0, 20)
    few = judge(rows(values))
    many = judge(
        [
            *rows(values),
            *(
                row
                for number in range(30)
                for row in rows(changed(0, 0, 20), category=f"c{number}")
            ),
        ]
    )
    assert figure_of(few).outcome == "fail"
    assert figure_of(many).outcome == "unclear"
    assert "63 figures" not in figure_of(few).because
    assert "32 figures are looked at" in figure_of(many).because


@pytest.mark.parametrize("limits", [(), (Limit("needle", RECALL, 0.05),)])
def test_a_category_with_nothing_to_lose_is_left_out_with_a_warning(limits):
    found = [*rows(changed(0, 0, 60)), *rows([(0.0, 0.0)] * 60, category="hard")]
    whole = report(found, limits)
    assert whole.outcome == "pass"
    assert whole.warnings == (
        "left out, because the baseline itself has nothing to lose there: needle/hard recall",
    )
    assert not figure_of(whole.figures, "hard").decides
    assert report(rows(changed(0, 0, 60)), limits).warnings == ()


@pytest.mark.parametrize(
    "limit",
    [
        Limit("needle", RECALL, 0.05, category="hard"),
        Limit("needle", RECALL, 0.05),
        Limit("needle", RECALL, 0.05, pooled=True),
    ],
)
def test_a_limit_on_nothing_but_what_has_nothing_to_lose_is_no_pass(limit):
    hard = rows([(0.0, 0.0)] * 60, category="hard")
    easy = rows(changed(0, 0, 60)) if limit.category else []
    found = report([*easy, *hard], [limit])
    assert found.outcome == "unclear"
    assert figure_of(found.figures, "hard").because.startswith("not informative")


def test_a_limit_that_only_nothing_to_lose_answers_says_so():
    found = report(rows([(0.0, 0.0)] * 60), [Limit("needle", RECALL, 0.05)])
    assert "nothing to lose in anything that 'needle.recall >= -5pt' is about" in found.warnings[0]
    assert report(rows([(0.0, 0.0)] * 60)).outcome == "unclear"


def test_figures_that_cannot_decide_cost_no_power():
    telling = rows(changed(8, 0, 20))
    unread = [
        row
        for number in range(30)
        for row in rows(changed(1, 0, 20), category=f"c{number}", suite="side", headline=False)
    ]
    hopeless = [
        row for number in range(30) for row in rows([(0.0, 0.0)] * 20, category=f"h{number}")
    ]
    spoiled = [row for n in range(30) for row in rows(changed(0, 0, 20), LEAK, f"s{n}", "leakage")]
    found = report([*telling, *unread, *hopeless, *spoiled], spoiled={"leakage": "timeouts"})
    assert figure_of(found.figures).outcome == "fail"
    assert found.outcome == "fail"


def test_figures_that_only_inform_are_still_corrected_among_themselves():
    values = changed(8, 0, 20)
    many = [
        row
        for number in range(40)
        for row in rows(changed(0, 0, 20), category=f"c{number}", headline=False)
    ]
    alone = judge(rows(values, headline=False))
    among = judge([*rows(values, headline=False), *many])
    assert figure_of(alone).outcome == "fail"
    assert figure_of(among).outcome == "unclear"


def test_figures_say_whether_they_decide():
    found = [
        *rows(changed(0, 0, 60)),
        *rows([(0.0, 0.0)] * 60, category="hard"),
        *rows([(0.0, 0.0)] * 60, LEAK, headline=False),
    ]
    deciding = {(each.category, each.metric) for each in report(found).figures if each.decides}
    assert deciding == {("single", "recall")}
    limit = [Limit("needle", RECALL, 0.05, category="hard")]
    deciding = {each.category for each in report(found, limit).figures if each.decides}
    assert deciding == {"hard"}


def test_a_suite_that_fails_together_decides():
    broken = [row for n in range(6) for row in rows(changed(4, 0, 4), category=f"c{n}")]
    assert figure_of(report(broken).figures, "").decides
    fine = [row for n in range(6) for row in rows(changed(0, 0, 4), category=f"c{n}")]
    assert not figure_of(report(fine).figures, "").decides


def test_sane_outputs_alone_are_no_pass_unless_a_limit_asks_for_no_more():
    sane = rows([(0.0, 0.0)] * 200, BROKEN_OUTPUT, suite=ANY, category="")
    found = report([*sane, *rows([(0.0, 0.0)] * 200)])
    assert figure_of(found.figures, "", "broken-output", ANY).outcome == "pass"
    assert found.outcome == "unclear"
    assert report(sane, [Limit(ANY, BROKEN_OUTPUT, 0.02)]).outcome == "pass"


@pytest.mark.parametrize("decides", [False, True])
def test_lost_second_metric_fails_only_if_it_decides(decides):
    role = QualityMetric("role", "share", "higher", "difference", 0.05, decides=decides)
    kept = rows([(0.0, 0.0)] * 60, LEAK, suite="leakage")
    lost = rows(changed(40, 0, 60), role, suite="leakage", headline=False)
    assert report([*kept, *lost]).outcome == ("fail" if decides else "pass")


def test_the_worst_category_decides_not_the_mean():
    found = report(
        [
            *rows(changed(0, 0, 200), category="single"),
            *rows(changed(30, 0, 60), category="multi-key"),
        ]
    )
    assert figure_of(found.figures).outcome == "pass"
    assert figure_of(found.figures, "multi-key").outcome == "fail"
    assert found.outcome == "fail"


def test_one_unclear_category_is_no_pass():
    found = report([*rows(changed(0, 0, 60)), *rows(changed(0, 0, 6), category="small")])
    assert found.outcome == "unclear"


def test_all_items_together_can_fail_but_not_pass_a_suite():
    broken = [row for n in range(6) for row in rows(changed(4, 0, 4), category=f"c{n}")]
    fine = [row for n in range(20) for row in rows(changed(0, 0, 4), category=f"c{n}")]
    assert figure_of(report(broken).figures, "").outcome == "fail"
    assert all(figure.outcome != "fail" for figure in report(broken).figures if figure.category)
    assert report(broken).outcome == "fail"
    assert figure_of(report(fine).figures, "").outcome == "pass"
    assert report(fine).outcome == "unclear"


def test_a_limit_on_the_mean_passes_with_all_items_together():
    fine = [row for n in range(20) for row in rows(changed(0, 0, 4), category=f"c{n}")]
    assert report(fine, [Limit("needle", RECALL, 0.05, pooled=True)]).outcome == "pass"
    assert report(fine, [Limit("needle", RECALL, 0.01, pooled=True)]).outcome == "unclear"


def about_texts(broken_of_each):
    """A category for each place in a text; `broken_of_each` text, its first items broke."""
    items = 5
    return [
        replace(row, about=f"text-{text}")
        for text, broken in enumerate(broken_of_each)
        for place in range(items)
        for row in rows([(float(place >= broken), 1.0)], category=f"c{place}")
    ]


def test_items_about_one_text_that_broke_together_are_less_evidence_than_single_ones():
    limit = [Limit("needle", RECALL, 0.1, pooled=True)]
    spread = report(about_texts([1] * 5 + [0] * 25), limit)
    together = report(about_texts([5] + [0] * 29), limit)
    spread_pooled, together_pooled = (figure_of(each.figures, "") for each in (spread, together))
    assert spread_pooled.change.estimate == together_pooled.change.estimate
    assert together_pooled.change.low < -0.08 < spread_pooled.change.low < -5 / 150
    assert (spread.outcome, together.outcome) == ("pass", "pass")
    tighter = [Limit("needle", RECALL, 0.08, pooled=True)]
    assert report(about_texts([1] * 5 + [0] * 25), tighter).outcome == "pass"
    assert report(about_texts([5] + [0] * 29), tighter).outcome == "unclear"


def test_two_texts_are_too_few_for_an_interval_over_all_their_items():
    found = report(about_texts([0, 0]), [Limit("needle", RECALL, 0.5, pooled=True)])
    assert figure_of(found.figures, "").change.low is None
    assert found.outcome == "unclear"


def test_levels_of_parts_of_a_text_are_judged_by_texts():
    parts = [
        replace(row, about=f"text-{text}")
        for text, level in enumerate((0.001, 0.001, 0.03))
        for part in range(20)
        for row in rows([(level, 0.0)], KL, category=f"p{part}")
    ]
    apart = [replace(row, about=f"{row.item}-{number}") for number, row in enumerate(parts)]
    limits = [Limit("needle", KL, 0.02, pooled=True)]
    assert report(apart, limits).outcome == "pass"
    assert report(parts, limits).outcome == "unclear"


def test_given_limits_only_what_they_name_counts():
    asked = [
        *rows(changed(0, 0, 60)),
        *rows([(1.0, 0.0)] * 4, KL, suite="fidelity", category="0-512"),
    ]
    assert report(asked).outcome == "fail"
    assert report(asked, [Limit("needle", RECALL, 0.05)]).outcome == "pass"
    assert report(asked, [Limit("needle", RECALL, 0.02)]).outcome == "unclear"


def test_the_limit_of_a_category_is_its_own():
    asked = [*rows(changed(0, 0, 60)), *rows(changed(0, 0, 60), category="multi-key")]
    limits = [Limit("needle", RECALL, 0.05), Limit("needle", RECALL, 0.01, category="multi-key")]
    found = judge(asked, limits)
    assert (figure_of(found).limit, figure_of(found).outcome) == (0.05, "pass")
    assert (figure_of(found, "multi-key").limit, figure_of(found, "multi-key").outcome) == (
        0.01,
        "unclear",
    )


def test_a_limit_answers_for_a_category_in_any_case():
    asked = rows(changed(0, 0, 60), category="Billing")
    assert report(asked, [Limit("needle", RECALL, 0.05, category="billing")]).outcome == "pass"


def test_other_metrics_than_the_headline_inform_but_do_not_decide():
    leaks = rows([(1.0, 0.0)] * 30 + [(0.0, 0.0)] * 30, LEAK, headline=False)
    found = report([*rows(changed(0, 0, 60)), *leaks])
    assert figure_of(found.figures, metric="leak").outcome == "fail"
    assert found.outcome == "pass"


def test_broken_outputs_count_beside_any_limits():
    asked = [
        *rows(changed(0, 0, 60)),
        *rows([(1.0, 0.0)] * 20 + [(0.0, 0.0)] * 40, BROKEN_OUTPUT, suite=ANY, category=""),
    ]
    found = report(asked, [Limit("needle", RECALL, 0.05)])
    assert figure_of(found.figures, "", "broken-output", ANY).outcome == "fail"
    assert found.outcome == "fail"


def test_what_was_not_asked_is_no_pass():
    asked = rows(changed(0, 0, 60))
    missing = report(asked, [Limit("needle", RECALL, 0.05), Limit("tools", RECALL, 0.05)])
    assert missing.outcome == "unclear"
    assert "tools.recall >= -5pt" in missing.warnings[0]
    assert report(asked, skipped={"tools": "all failed"}).outcome == "unclear"
    assert report([]).outcome == "unclear"


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ((), "unclear"),
        ((Limit("needle", RECALL, 0.06),), "pass"),
        ((Limit("needle", RECALL, 0.06), Limit("tools", RECALL, 0.06)), "unclear"),
        ((Limit("needle", RECALL, 0.06), Limit(ANY, BROKEN_OUTPUT, 0.1)), "unclear"),
    ],
)
def test_a_suite_that_was_skipped_matters_where_it_counts(limits, outcome):
    fine = rows([(0.0, 0.0)] * 60, BROKEN_OUTPUT, suite=ANY, category="")
    asked = [*rows(changed(0, 0, 60)), *(fine if limits[1:] else ())]
    assert report(asked, limits, skipped={"tools": "too long"}).outcome == outcome


def test_a_suite_that_lost_its_items_is_unclear_with_the_reason():
    found = report(rows(changed(40, 0, 60)), spoiled={"needle": "9 of 69 items failed: timeout"})
    assert found.outcome == "unclear"
    assert {figure.because for figure in found.figures} == {"9 of 69 items failed: timeout"}


def noisy_rows(rng, noise):
    """Nothing but noise: twelve categories of right-or-wrong items and one of levels."""
    found = []
    for number in range(12):
        skill = rng.choice([0.2, 0.5, 0.9])
        truth = [rng.random() < skill for _ in range(24)]
        runs = [[float(own ^ (rng.random() < noise)) for own in truth] for _ in range(3)]
        found += rows(
            list(zip(runs[0], runs[1], strict=True)), category=f"c{number}", again=runs[2]
        )
    level = [abs(rng.gauss(0, 0.01)) for _ in range(8)]
    return found + rows(
        [(value, 0.0) for value in level],
        KL,
        suite="fidelity",
        again=[abs(rng.gauss(0, 0.01)) for _ in range(8)],
    )


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_baseline_against_itself_hardly_ever_fails(noise):
    rng = random.Random(11)
    reports = [report(noisy_rows(rng, noise)) for _ in range(40)]
    failed = sum(any(figure.outcome == "fail" for figure in found.figures) for found in reports)
    assert failed <= 2


def test_planted_damage_is_found_in_most_runs():
    rng = random.Random(5)
    found = 0
    for _ in range(20):
        values = [(float(rng.random() > 0.35), 1.0) for _ in range(60)]
        fine = [row for n in range(10) for row in rows(changed(0, 0, 60), category=f"c{n}")]
        found += report([*fine, *rows(values)]).outcome == "fail"
    assert found >= 16
