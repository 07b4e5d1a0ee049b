"""What follows from a study's measurements, against values worked out by hand."""

import math

import pytest
from contracts.studies import MIB, add, add_round, failed, measured, new_study, of, report
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.prices import cost_texts
from kvtune.autotune.report import study_findings
from kvtune.autotune.report.study_findings import (
    LEAST_TRIALS,
    confirmations,
    importance,
    knobs,
    margins,
    memory_front,
    progress,
    quality_front,
    value_text,
)
from kvtune.autotune.report.study_prices import failures, prices
from kvtune.autotune.report.study_view import Standing, study_view
from kvtune.store.database import open_store
from kvtune.types import Decision, FailureClass, Goal, Interval

FP8 = {"kv-cache-dtype": "fp8"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("store") / "s.db") as opened:
        yield opened


def test_the_best_so_far_never_falls_and_counts_only_what_may_be_shipped(store):
    view = of(
        store,
        ({}, measured(2.0)),
        ({"block-size": 32}, measured(9.0, ttft_s=0.9)),
        ({"block-size": 64}, failed()),
        ({"block-size": 128}, measured(3.0)),
        ({"block-size": 256}, measured(1.0)),
    )
    found = progress(view)
    assert [each.best for each in found] == [2.0, 2.0, 2.0, 3.0, 3.0]
    assert [each.standing for each in found] == [
        Standing.MET,
        Standing.MISSED,
        Standing.FAILED,
        Standing.MET,
        Standing.MET,
    ]
    assert found[2].value is None
    spent = [each.spent_s for each in found]
    assert spent == sorted(spent)


def test_before_anything_meets_the_goal_there_is_no_best(store):
    view = of(store, ({}, measured(2.0, ttft_s=0.9)))
    assert [each.best for each in progress(view)] == [None]


def test_a_finalists_rounds_are_paired_with_those_of_stock_by_round(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    add(store, study, 1, {"block-size": 32}, measured(4.0))
    add_round(store, study, 2, 0, {}, 1.0, of_round=1)
    add_round(store, study, 3, 1, {"block-size": 32}, 2.0, of_round=1)
    add_round(store, study, 4, 1, {"block-size": 32}, 16.0, of_round=2)
    add_round(store, study, 5, 0, {}, 2.0, of_round=2)
    add_round(store, study, 6, 1, {"block-size": 32}, 5.0, of_round=3)
    stock, finalist = confirmations(study_view(store, study))
    assert stock.rounds == {1: 1.0, 2: 2.0}
    assert stock.ratio is None
    assert finalist.rounds == {1: 2.0, 2: 16.0, 3: 5.0}
    assert finalist.mean.estimate == pytest.approx(23 / 3)
    # Ratios 2 and 8: the geometric mean is 4; t of 1 degree of freedom at 97.5% is 12.706.
    assert finalist.ratio.estimate == pytest.approx(4.0)
    half = 12.7062 * math.log(2)
    assert finalist.ratio.high == pytest.approx(4 * math.exp(half), rel=1e-3)
    assert finalist.ratio.repeats == 2


def test_the_ratio_that_was_decided_by_is_the_one_that_is_shown(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    for number in (1, 2):
        add(store, study, number, {"block-size": 32 * number}, measured(4.0))
    for of_round in (1, 2):
        for place, value in enumerate((2.0, 4.0, 6.0)):
            arguments = {"block-size": 32 * place} if place else {}
            add_round(store, study, 3 * of_round + place, place, arguments, value, of_round)
    decided = Interval(estimate=2.0, low=1.25, high=3.25, unit="ratio", repeats=2)
    store.save_decision(
        study, Decision(outcome="winner", recommended=1, baseline=0, gain_ratio=decided)
    )
    _, recommended, other = confirmations(study_view(store, study))
    assert recommended.ratio == decided
    assert other.ratio.estimate == pytest.approx(3.0)


@pytest.mark.parametrize("found", [failed(), measured(math.inf), measured(math.nan)])
def test_a_round_without_a_number_is_no_value(store, found):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    add_round(store, study, 1, 0, {}, found, of_round=1)
    assert confirmations(study_view(store, study)) == []


def test_a_setting_that_decides_alone_has_the_whole_variance(store):
    trials = [
        ({"block-size": size, "max-num-seqs": width}, measured(goodput))
        for size, goodput in ((16, 1.0), (32, 3.0))
        for width in (4, 8)
        for _ in range(2)
    ]
    view = of(store, *trials)
    shares = {each.name: each.share for each in importance(view)}
    # Within a block size nothing varies, so all of it is between; between widths nothing varies.
    assert shares == {"block-size": pytest.approx(1.0), "max-num-seqs": 0.0}


def test_importance_is_epsilon_squared(store):
    values = {16: (1.0, 2.0, 3.0, 2.0), 32: (5.0, 6.0, 7.0, 6.0)}
    view = of(
        store,
        *(({"block-size": size}, measured(v)) for size, found in values.items() for v in found),
    )
    # Means 2 and 6 around 4: between 32, within 2 + 2 = 4, total 36, mean square within 4 / 6.
    assert importance(view)[0].share == pytest.approx((32 - 4 / 6) / 36)


def test_too_few_trials_and_values_that_came_once_have_no_importance(store):
    few = [({"block-size": 16 * (n % 2 + 1)}, measured(1.0 + n)) for n in range(LEAST_TRIALS - 1)]
    assert importance(of(store, *few)) == []
    once = [({"block-size": 16 * (n + 1)}, measured(1.0 + n)) for n in range(LEAST_TRIALS)]
    assert importance(of(store, *once)) == []


@given(
    st.lists(
        st.lists(st.floats(0, 1e3), min_size=2, max_size=5),
        min_size=2,
        max_size=5,
    )
)
def test_a_share_of_the_variance_is_between_none_and_all(groups):
    share = study_findings._epsilon_squared(groups)
    assert share is None or 0 <= share <= 1 + 1e-9


def test_the_stock_value_of_a_setting_is_what_its_server_reported(store):
    view = of(
        store,
        ({}, measured(2.0)),
        ({"block-size": 32}, measured(2.0)),
        ({"block-size": 16, "watermark": 0.1}, measured(2.0)),
    )
    size, watermark = knobs(view)
    assert size.values == {0: "16", 1: "32", 2: "16"}
    assert size.levels == ["16", "32"]
    assert watermark.levels == ["0.1", "default"]


def test_settings_that_all_trials_share_are_no_knobs(store):
    view = of(store, *(({"block-size": 32}, measured(2.0)) for _ in range(2)))
    assert knobs(view) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("x", True, "on"),
        ("x", 2.0, "2"),
        ("x", 0.25, "0.25"),
        ("x", 2147483648, "2147483648"),
        ("kv-cache-memory-bytes", 64 * MIB, "64 MiB"),
        ("kv-cache-memory-bytes", 64 * MIB + 1, f"{64 * MIB + 1}"),
        ("x", None, "default"),
    ],
)
def test_values_read_as_people_write_them(name, value, text):
    assert value_text(value, name) == text


def test_the_memory_front_holds_what_nothing_beats_in_both(store):
    view = of(
        store,
        ({}, measured(2.0, memory_bytes=64 * MIB)),
        ({"a": 1}, measured(3.0, memory_bytes=128 * MIB)),
        ({"a": 2}, measured(1.0, memory_bytes=96 * MIB)),
        ({"a": 3}, measured(2.5, memory_bytes=128 * MIB)),
    )
    assert {spot.number for spot in memory_front(view) if spot.on_front} == {0, 1}


def test_pools_of_one_size_have_no_memory_front(store):
    view = of(
        store,
        ({}, measured(2.0, memory_bytes=1000 * MIB)),
        ({"a": 1}, measured(3.0, memory_bytes=1001 * MIB)),
    )
    assert memory_front(view) == []


def test_quality_is_only_drawn_of_answers_that_were_compared(store):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    assert quality_front(view) == []
    store.save_quality_report(report(), study=view.study, trial=1)
    view = study_view(store, view.study)
    assert [(spot.number, spot.cost) for spot in quality_front(view)] == [(0, 0.0), (1, 0.01)]


def test_what_lost_too_much_is_on_no_front_and_not_the_best(store):
    view = of(store, ({}, measured(2.0)), (FP8, measured(3.0)))
    store.save_quality_report(report("fail"), study=view.study, trial=1)
    view = study_view(store, view.study)
    assert view.point(1).standing is Standing.OUT
    assert "worse than allowed" in view.point(1).why
    assert [spot.on_front for spot in quality_front(view)] == [True, False]
    assert [each.best for each in progress(view)] == [2.0, 2.0]


def test_margins_say_how_much_of_each_limit_is_used(store):
    view = of(store, ({}, measured(2.0, ttft_s=0.4)), ({"a": 1}, failed()))
    assert [(each.number, each.limit, each.used) for each in margins(view)] == [
        (0, "p95 ttft <= 800ms", pytest.approx(0.5))
    ]


def test_a_goal_without_limits_has_no_margins(store):
    assert margins(of(store, ({}, measured(2.0)), goal=Goal())) == []


def test_each_rung_has_a_price_beside_the_best_below_it(store):
    view = of(
        store,
        ({}, measured(2.0)),
        ({"block-size": 32}, measured(3.0)),
        ({"block-size": 64}, measured(4.0)),
        (FP8, measured(5.0)),
    )
    store.save_quality_report(report("unclear"), study=view.study, trial=3)
    found = prices(study_view(store, view.study))
    assert [(each.rung, each.trial, each.over) for each in found] == [
        ("L0", 0, None),
        ("L1", 2, 0),
        ("L2", 3, 2),
    ]
    assert [each.gain and each.gain.estimate for each in found] == [None, 2.0, 1.25]
    assert found[2].gain.low is None, "single trials prove nothing"
    assert cost_texts(found[1]) == ["nothing: answers are computed as before"]
    assert cost_texts(found[2]) == ["fidelity/all kl +0.01 (0.008 to 0.012) nats", "not proven"]


def test_a_gain_that_was_confirmed_has_the_interval_of_its_rounds(store):
    study = new_study(store)
    add(store, study, 0, {}, measured(2.0))
    add(store, study, 1, {"block-size": 32}, measured(9.0))
    for of_round, (stock, ours) in enumerate(((1.0, 2.0), (1.0, 2.1)), start=1):
        add_round(store, study, 2 * of_round, 0, {}, stock, of_round)
        add_round(store, study, 2 * of_round + 1, 1, {"block-size": 32}, ours, of_round)
    gain = prices(study_view(store, study))[1].gain
    assert gain.estimate == pytest.approx(math.sqrt(2.0 * 2.1))
    assert gain.low < gain.estimate < gain.high


def test_a_rung_that_lost_too_much_is_no_ground_for_the_next(store):
    wrong = measured(9.0, canary_answers=("no idea",) * 3)
    view = of(store, ({}, measured(2.0)), (FP8, wrong), ({"kv-bits": 4}, measured(4.0)))
    found = prices(view)
    assert [(each.rung, each.trial, each.over) for each in found] == [
        ("L0", 0, None),
        ("L2", 1, 0),
        ("L3", 2, 0),
    ]


def test_there_is_no_ratio_to_a_goodput_of_zero(store):
    found = prices(of(store, ({}, measured(0.0)), ({"block-size": 32}, measured(3.0))))
    assert found[1].over == 0
    assert found[1].gain is None


def test_failures_are_told_by_class_the_most_frequent_first(store):
    full = failed(FailureClass.OUT_OF_MEMORY, "no room")
    view = of(
        store,
        ({}, measured(1.0)),
        ({"a": 1}, full),
        ({"a": 2}, failed(message="segfault", log="line 1")),
        ({"a": 3}, failed(message="segfault")),
    )
    found = failures(view)
    assert list(found) == [FailureClass.CRASH_UNDER_LOAD, FailureClass.OUT_OF_MEMORY]
    assert [(each.trial, each.message) for each in found[FailureClass.CRASH_UNDER_LOAD]] == [
        (2, "segfault"),
        (3, "segfault"),
    ]
