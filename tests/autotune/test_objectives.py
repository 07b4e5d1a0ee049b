"""What is wanted beside the goal's objective: what is known of it, and who no other trial beats."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.landscape import RIGHT

from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Also
from kvtune.autotune.objectives import (
    ASSUMED_RATIO,
    Noise,
    Objectives,
    divergence,
    noise_of,
    pool_bytes,
)
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Failure,
    FailureClass,
    Goal,
    Harm,
    Interval,
    Measurement,
    PolicyStack,
    QualityFigure,
    QualityReport,
    Slo,
    Status,
    Trial,
)

GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
FORMATS = {Harm.NEAR_LOSSLESS: "fp8", Harm.LOSSY: "int4"}


def measured(*goodput, pool=100, ttft_s=0.5, **more):
    return Measurement(
        status=Status.OK,
        metrics={"goodput_requests_per_s": goodput, "ttft_p95_s": (ttft_s,) * len(goodput)},
        effective=EffectiveConfig(kv_cache_memory_bytes=pool),
        canary_answers=RIGHT,
        **more,
    )


def entry(number, measurement, harm=Harm.LOSSLESS, parent=None):
    arguments = {"kv-cache-dtype": FORMATS[harm]} if harm in FORMATS else {"block-size": number}
    choice = Choice(policy="p", parameters={}, arguments=arguments, harm=harm)
    trial = Trial(
        number=number,
        parent=parent,
        stack=PolicyStack(choices=(choice,) if number else ()),
        base_arguments={},
        repeats=1,
        seed=0,
    )
    return Entry(trial, measurement, reused=False)


def figure(kl, spread=0.001, floor=None, category=""):
    return QualityFigure(
        suite="fidelity",
        category=category,
        metric="kl",
        unit="nats",
        better="lower",
        kind="level",
        limit=0.02,
        items=16,
        candidate=kl,
        baseline=0.0,
        change=Interval(estimate=kl, low=kl - spread, high=kl + spread, unit="nats", repeats=16),
        floor=None
        if floor is None
        else Interval(estimate=floor / 2, low=0.0, high=floor, unit="nats", repeats=16),
        outcome="pass",
        because="b",
    )


class Judge:
    """Has reports of trials by number, and nothing against anybody but those `against`."""

    def __init__(self, reports=(), against=()):
        self.reports = dict(reports)
        self.against = against

    def report(self, number):
        return self.reports.get(number)

    def objection(self, trial):
        return "its answers are worse" if trial.number in self.against else None

    def unproved(self, trial):
        is_known = trial.number in self.reports or trial.stack.harm is Harm.LOSSLESS
        return None if is_known else "it was not asked"


def report(*figures):
    return QualityReport(outcome="pass", figures=figures)


def front(points, also=(Also.MEMORY,), quality=None, confirmed=None):
    stock = next((e.measurement for e in points if e.trial.number == 0), None)
    return Objectives(GOAL, also, quality).front(points, Gates(stock, quality), confirmed or {})


def numbers(found):
    return [point.trial for point in found.points]


def test_who_has_less_of_both_beyond_noise_is_beaten_and_the_best_comes_first():
    found = front(
        [
            entry(0, measured(5.0, pool=100)),
            entry(1, measured(9.0, pool=200)),
            entry(2, measured(4.0, pool=150)),
        ]
    )
    assert numbers(found) == [1, 0]
    assert found.beaten == {2: 0}
    assert found.ends == {"goodput": 1, "memory": 0}
    assert found.objectives == ("goodput", "memory")


def test_within_noise_nobody_is_beaten_and_the_front_says_who_is_no_better():
    found = front([entry(0, measured(5.0)), entry(1, measured(5.1))])
    assert numbers(found) == [1, 0]
    assert [point.no_better_than for point in found.points] == [(0,), (1,)]


def test_more_rounds_tell_apart_what_one_does_not():
    once = {0: measured(5.0), 1: measured(5.5)}
    often = {0: measured(*[4.99, 5.01] * 3), 1: measured(*[5.49, 5.51] * 3)}
    points = [entry(number, one) for number, one in once.items()]
    assert numbers(front(points)) == [1, 0]
    assert numbers(front(points, confirmed=often)) == [1]
    assert numbers(front([entry(n, one) for n, one in often.items()])) == [1]
    assert front(points, confirmed=often).points[0].confirmed.repeats == 6


@pytest.mark.parametrize(
    "bad",
    [
        measured(9.0, ttft_s=2.0),
        Measurement(
            status=Status.FAILED,
            failure=Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it died"),
        ),
        measured(9.0).model_copy(update={"status": Status.CUT, "share": 0.3}),
    ],
    ids=["misses the goal", "failed", "cut"],
)
def test_what_cannot_be_shipped_is_not_on_the_front_and_beats_nobody(bad):
    found = front([entry(0, measured(5.0)), entry(1, bad)])
    assert numbers(found) == [0]
    assert found.beaten == {}


def test_what_fails_or_misses_the_goal_at_the_confirmation_is_out():
    points = [entry(0, measured(5.0)), entry(1, measured(9.0))]
    assert numbers(front(points, confirmed={0: measured(5.0), 1: measured(9.0, ttft_s=2.0)})) == [0]


def test_answers_that_are_rejected_keep_a_trial_off_the_front():
    points = [entry(0, measured(5.0)), entry(1, measured(9.0), Harm.NEAR_LOSSLESS)]
    judge = Judge({1: report(figure(0.01))}, against=(1,))
    assert numbers(front(points, (Also.QUALITY,), judge)) == [0]


def test_lossless_settings_diverge_by_0_by_definition_up_to_the_noise_floor():
    points = [
        entry(0, measured(5.0)),
        entry(1, measured(9.0), Harm.NEAR_LOSSLESS),
        entry(2, measured(9.1), Harm.LOSSY),
    ]
    judge = Judge({1: report(figure(0.01, floor=0.0004)), 2: report(figure(0.3))})
    found = front(points, (Also.QUALITY,), judge)
    assert numbers(found) == [2, 1, 0]
    by_number = {point.trial: point.figures["quality"] for point in found.points}
    assert (by_number[0].estimate, by_number[0].high) == (0.0, 0.0004)
    assert by_number[1].estimate == 0.01
    assert "0 by definition" in by_number[0].method
    assert any("stock differs from itself by 0.0002" in reason for reason in found.reasons)
    assert found.knee == 1, "next to all of the goodput for next to none of the harm"


def test_a_divergence_within_the_noise_floor_is_no_worse_than_none():
    points = [entry(0, measured(9.0)), entry(1, measured(9.2), Harm.NEAR_LOSSLESS)]
    judge = Judge({1: report(figure(0.0008, spread=0.0005, floor=0.001))})
    found = front(points, (Also.QUALITY,), judge)
    assert {p.trial: p.no_better_than for p in found.points} == {1: (0,), 0: (1,)}


def test_a_trial_of_which_an_objective_is_unknown_has_no_place_and_the_front_says_why():
    points = [
        entry(0, measured(5.0)),
        entry(1, measured(9.0), Harm.NEAR_LOSSLESS),
        entry(2, measured(6.0, pool=None)),
    ]
    found = front(points, (Also.QUALITY, Also.MEMORY), Judge())
    assert numbers(found) == [0]
    assert found.unplaced == {
        1: "its quality was not measured",
        2: "its memory was not measured",
    }


def test_what_nobody_vouches_for_is_told():
    points = [entry(0, measured(5.0)), entry(1, measured(9.0, pool=200), Harm.NEAR_LOSSLESS)]
    found = front(points, quality=Judge())
    assert {point.trial: point.doubt for point in found.points} == {1: "it was not asked", 0: ""}


def test_an_empty_front_says_so():
    found = front([entry(0, measured(5.0, ttft_s=3.0))])
    assert (found.points, found.ends, found.knee) == ((), {}, None)
    assert any("no measured trial meets every goal" in reason for reason in found.reasons)


def test_the_ends_and_the_knee_stand_out_in_this_order():
    points = [
        entry(0, measured(1.0, pool=100)),
        entry(1, measured(9.0, pool=900)),
        entry(2, measured(7.0, pool=300)),
        entry(3, measured(8.0, pool=800)),
    ]
    objectives = Objectives(GOAL, (Also.MEMORY,))
    assert objectives.outstanding(points, Gates(points[0].measurement, None)) == [1, 0, 2]
    assert Objectives(GOAL).outstanding(points, Gates(points[0].measurement, None)) == []


def test_a_repeat_has_the_quality_of_the_trial_that_it_repeats():
    again = entry(7, measured(9.0), Harm.NEAR_LOSSLESS, parent=1)
    objectives = Objectives(GOAL, (Also.QUALITY,), Judge({1: report(figure(0.01))}))
    assert objectives.costs(again)["quality"].estimate == 0.01


def test_of_the_fidelity_suite_the_figure_over_all_categories_counts():
    over_all = figure(0.01)
    assert divergence(report(figure(0.5, category="2048"), over_all)) == over_all
    assert divergence(report()) is None


def test_noise_is_what_repeats_of_one_configuration_differ_by():
    """Logarithms of 1 and e differ by 1: a variance of a half with one degree of freedom each."""
    pairs = [measured(1.0, 2.718281828459045)] * 4
    found = noise_of(GOAL, [*pairs, measured(70.0)])
    assert (found.ratio, found.freedom) == (pytest.approx(0.5**0.5), 4)
    assert noise_of(GOAL, pairs[:2]) == Noise(ASSUMED_RATIO), "two repeats say too little"


def test_trials_of_the_search_are_never_compared_by_less_than_what_servers_differ_by():
    """Rounds differ by 0.03%, and yet 3% apart in the search is nothing."""
    often = {n: measured(*[own, own * 1.0003] * 3) for n, own in enumerate((5.0, 5.15))}
    points = [
        entry(n, measured(one.metrics["goodput_requests_per_s"][0])) for n, one in often.items()
    ]
    found = front(points, confirmed={0: often[0]})
    assert numbers(found) == [1, 0]
    assert found.points[0].figures["goodput"].high > 5.15 * 1.05


def test_the_interval_of_one_measurement_is_as_wide_as_the_noise():
    """95% of a normal distribution lie within 1.96 standard deviations."""
    found = Noise(0.05).interval([10.0], "requests/s")
    assert found.low == pytest.approx(10 * 2.718281828**-0.098, rel=1e-4)
    assert found.high == pytest.approx(10 * 2.718281828**0.098, rel=1e-4)
    four = Noise(0.05).interval([10.0] * 4, "requests/s")
    assert four.high == pytest.approx(10 * 2.718281828**0.049, rel=1e-4)


def test_a_pool_is_as_large_as_the_engine_says_or_as_its_tokens_take():
    said = EffectiveConfig(kv_cache_memory_bytes=1000, kv_cache_size_tokens=50)
    found = SimpleNamespace(
        effective=said, kv_bytes_per_token_observed=None, kv_bytes_per_token_predicted=4
    )
    assert pool_bytes(found, {}) == 1000
    assert pool_bytes(found, {"num-gpu-blocks-override": 2}) == 200, "no share of any budget"
    found.effective = None
    assert pool_bytes(found, {}) is None


def test_the_divergence_of_what_scores_of_prompts_do_not_show_is_unknown_and_not_0():
    hidden = {"additional-config.kvtune.quest.budget_tokens": 256}
    asked = entry(1, measured(9.0), Harm.LOSSY)
    (choice,) = asked.trial.stack.choices
    stack = PolicyStack(choices=(choice.model_copy(update={"arguments": hidden}),))
    asked = replace(asked, trial=asked.trial.model_copy(update={"stack": stack}))
    points = [entry(0, measured(5.0)), asked]
    found = front(points, (Also.QUALITY,), Judge({1: report(figure(0.0))}))
    assert numbers(found) == [0]
    assert found.unplaced[1].startswith("its quality was not measured: Quest acts on answers alone")
    other = entry(1, measured(9.0), Harm.NEAR_LOSSLESS)
    trial = other.trial.model_copy(update={"base_arguments": hidden})
    points = [entry(0, measured(5.0)), replace(other, trial=trial)]
    found = front(points, (Also.QUALITY,), Judge({1: report(figure(0.01))}))
    assert numbers(found) == [1, 0], "where stock reads so too, what else it does shows"
