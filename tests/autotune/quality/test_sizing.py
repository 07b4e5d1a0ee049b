"""What has to be asked so that limits can be proved, with the suites that are shipped."""

import random
from collections import Counter

import pytest

from kvtune.autotune.quality.answers import Questions
from kvtune.autotune.quality.seen import TYPICAL_CHANGE, Level, Seen
from kvtune.autotune.quality.sizing import (
    MOST_PER_CATEGORY,
    POWER,
    asked_suites,
    check_limits,
    own_suites,
    proving,
    questions_for,
)
from kvtune.errors import BadGoal
from kvtune.profilers.quality import gate
from kvtune.profilers.quality.figures import Row
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, parse_limits
from kvtune.profilers.quality.paired import tango_interval
from kvtune.profilers.quality.suite import Size, SuitePlan

README_LIMITS = ("needle >= -5pt", "kl <= 0.02", "worst-instruction >= -5pt")
CONTEXT_TOKENS = 8192


def questions(*limits, size=Size.STANDARD):
    return proving(asked_suites(), SuitePlan(size, max_tokens=CONTEXT_TOKENS), parse_limits(limits))


def outcome(asked, loses=lambda number: False):
    """The outcome of answers that are the same, but for items that the candidate loses."""
    rows = []
    for suite in asked.suites:
        for number, item in enumerate(suite.items(asked.plan_of(suite))):
            about = item.about or f"{suite.name}/{item.key}"
            for metric in suite.metrics:
                same, lost = (1.0, 0.0) if metric.better == "higher" else (0.0, 1.0)
                ours = lost if metric is suite.metrics[0] and loses(number) else same
                rows.append(
                    Row(
                        suite=suite.name,
                        category=item.category,
                        item=item.key,
                        metric=metric,
                        headline=metric is suite.metrics[0],
                        ours=ours,
                        theirs=same,
                        again=(same, same),
                        about=about,
                    )
                )
            if item.scored is None:
                fine = (0.0, 0.0)
                broken = Row(ANY, "", item.key, BROKEN_OUTPUT, True, *fine, fine, about)
                rows.append(broken)
    return gate.report(rows, asked.limits).outcome


# --- enough to prove it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "size"),
    [((), Size.STANDARD), (README_LIMITS, Size.STANDARD), (README_LIMITS, Size.FULL)],
)
def test_equal_answers_pass_at_every_size_that_has_to_prove_something(size, limits):
    assert outcome(questions(*limits, size=size)) == "pass"


@pytest.mark.parametrize("suite", asked_suites(), ids=lambda suite: suite.name)
def test_equal_answers_of_every_suite_pass_alone_by_a_wide_limit(suite):
    metric = suite.metrics[0]
    share = metric.kind == "difference" and metric.unit == "share"
    sign = ">= -" if metric.better == "higher" else "<= "
    limit = f"{suite.name} {sign}{'10pt' if share else metric.limit}"
    assert outcome(questions(limit)) == "pass", "broken outputs have to be ruled out too"


@pytest.mark.parametrize(
    "limit", ["mean-needle >= -0.5pt", "any.broken-output <= 0.5pt", "needle/single >= -1pt"]
)
def test_limits_on_less_or_more_than_each_category_can_be_proved(limit):
    assert outcome(questions(limit)) == "pass"


@pytest.mark.parametrize("limits", [(), README_LIMITS])
def test_a_screen_of_equal_answers_is_unclear(limits):
    plan = SuitePlan(Size.SCREEN, max_tokens=CONTEXT_TOKENS)
    assert outcome(Questions(asked_suites(), plan, parse_limits(limits))) == "unclear"


def test_answers_of_which_many_are_lost_do_not_pass():
    assert outcome(questions("needle >= -5pt"), loses=lambda number: number % 5 == 0) == "fail"


def test_no_category_has_fewer_items_than_its_size_would_give():
    by_size = SuitePlan(Size.FULL, max_tokens=CONTEXT_TOKENS)
    asked = questions("needle >= -10pt", size=Size.FULL)
    (needle,) = asked.suites
    assert asked.count == len(needle.items(by_size))


SHORT_PROMPTS = tuple(f"prompt {number} " * 60 for number in range(20))
"""Too short for the second part of a text, which every other text has, then."""


def asked_of_level(squares):
    """Questions where a screen showed a KL of 0.01 with such a variance, of a limit of 0.03."""
    level = {category: Level(0.01, squares) for category in ("0-512", "512-1k")}
    plan = SuitePlan(Size.STANDARD, max_tokens=2048, workload=SHORT_PROMPTS)
    seen = Seen(levels={("fidelity", "kl"): level})
    return proving(asked_suites(), plan, parse_limits(["kl <= 0.03"]), seen)


def items_of(asked):
    """The items of fidelity by category."""
    (suite,) = (each for each in asked.suites if each.name == "fidelity")
    found = {}
    for item in suite.items(asked.plan_of(suite)):
        found.setdefault(item.category, []).append(item.key)
    return found


@pytest.mark.parametrize("squares", [3e-4, 5e-4, 8e-4, 2e-3])
def test_a_category_that_only_some_texts_reach_gets_as_many_items_as_it_needs(squares):
    asked = asked_of_level(squares)
    assert asked.numbers["fidelity"] > 8
    assert asked.chance == 1.0
    assert asked.too_few == ()


def test_who_needs_more_of_one_category_is_asked_no_less_of_another():
    few, more = items_of(asked_of_level(1e-4)), items_of(asked_of_level(3e-4))
    assert len(few["512-1k"]) < len(more["512-1k"])
    assert all(set(few[category]) <= set(more[category]) for category in few)


def per_category(asked):
    """How many items of each category of each suite are asked."""
    return {
        suite.name: set(Counter(i.category for i in suite.items(asked.plan_of(suite))).values())
        for suite in asked.suites
    }


def test_what_one_suite_needs_is_not_asked_of_another():
    alone = per_category(questions("needle/single >= -2pt", "worst-instruction >= -10pt"))
    assert max(alone["instructions"]) < min(alone["needle"])


@pytest.mark.parametrize("size", [Size.STANDARD, Size.FULL])
def test_a_right_candidate_mostly_passes_all_limits(size):
    asked = questions("worst-instruction >= -5pt", size=size)
    (items,) = per_category(asked)["instructions"]
    categories = len({item.category for item in asked.suites[0].items(asked.plan)})
    rng = random.Random(9)
    change = TYPICAL_CHANGE[size]
    passes: dict[tuple[int, int], bool] = {}

    def all_pass():
        for _ in range(categories):
            changed = sum(rng.random() < change for _ in range(items))
            broken = sum(rng.random() < 0.5 for _ in range(changed))
            seen = (broken, changed - broken)
            if seen not in passes:
                passes[seen] = tango_interval(*seen, items).low >= -0.05
            if not passes[seen]:
                return False
        return True

    runs = 200
    assert sum(all_pass() for _ in range(runs)) >= (POWER - 0.08) * runs


def test_lengths_of_samples_are_asked_more_than_those_of_greedy_answers():
    (greedy,) = per_category(questions("length-shift <= 0.2", "broken-output <= 20%"))[
        "length-shift"
    ]
    (sampled,) = per_category(questions("sampled-length <= 0.2"))["length-shift"]
    assert greedy < 30
    assert 120 < sampled < MOST_PER_CATEGORY


def test_more_figures_need_more_items_of_each():
    (few,) = per_category(questions("needle/single >= -5pt"))["needle"]
    (many,) = per_category(questions("needle >= -5pt", "worst-instruction >= -5pt"))["needle"]
    assert 68 < few < many


def test_what_more_than_the_most_would_be_needed_for_is_said():
    assert questions("needle >= -5pt").doubts == ()
    asked = questions("needle >= -1pt")
    assert per_category(asked)["needle"] == {MOST_PER_CATEGORY}
    (doubt,) = asked.doubts
    assert doubt.startswith("'needle.recall >= -1pt' would take ")
    assert doubt.endswith("and 400 are asked: it may stay unproved")


def test_a_file_that_is_too_short_to_prove_its_limits_is_said(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "two and two?", "check": {"contains": "four"}}\n' * 30)
    plan = SuitePlan(data=str(file))
    for limit, is_doubtful in (("yours >= -5pt", True), ("yours >= -40pt", False)):
        limits = parse_limits([limit, "broken-output <= 40pt"])
        asked = proving(own_suites(plan.data), plan, limits)
        assert asked.count == 30
        assert [each.partition(" would")[0] for each in asked.doubts] == (
            ["'yours.score >= -5pt'"] if is_doubtful else []
        )
        assert all("and 30 are asked: it cannot be proved" in each for each in asked.doubts)


def test_a_file_that_is_too_short_to_see_broken_outputs_is_said(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "two and two?", "check": {"contains": "four"}}\n' * 30)
    plan = SuitePlan(data=str(file))
    (doubt,) = proving(own_suites(plan.data), plan, parse_limits(["yours >= -40pt"])).doubts
    assert doubt.startswith("'any.broken-output <= 2pt' would take ")
    assert doubt.endswith("and 30 are asked: it cannot be proved unless answers get better")


@pytest.mark.parametrize(
    ("limits", "about"), [(README_LIMITS, 3100), ((), 5100), (("needle >= -1pt",), 2400)]
)
def test_what_the_readme_says_of_the_number_of_items_is_so(limits, about):
    assert questions(*limits).count == pytest.approx(about, abs=100)


# --- what a screen has shown ----------------------------------------------------------------------


def test_a_suite_of_which_more_changed_is_asked_more():
    plan = SuitePlan(max_tokens=CONTEXT_TOKENS)
    limits = parse_limits(["multi-turn >= -5pt", "needle >= -5pt"])
    quiet, noisy, little = (
        per_category(proving(asked_suites(), plan, limits, Seen(changes)))
        for changes in ({}, {"multi-turn": 0.05}, {"multi-turn": 0.001})
    )
    assert max(noisy["multi-turn"]) > 1.5 * max(quiet["multi-turn"])
    assert noisy["needle"] == quiet["needle"]
    assert little == quiet, "typical is the least that is assumed"


def fidelity(mean, squares, *limits):
    levels = {("fidelity", "kl"): {"0-512": Level(0.01, squares), "512-1k": Level(mean, squares)}}
    plan = SuitePlan(max_tokens=CONTEXT_TOKENS)
    return proving(
        asked_suites(), plan, parse_limits(limits or ["kl <= 0.02"]), Seen({}, 0, levels)
    )


def test_a_level_is_asked_by_how_near_its_worst_category_is_to_the_limit_and_how_it_varies():
    by_size = per_category(questions("kl <= 0.02"))["fidelity"]
    assert per_category(fidelity(0.011, 0.002**2))["fidelity"] == by_size, "16 texts are enough"
    (near,) = per_category(fidelity(0.019, 0.002**2))["fidelity"]
    (varied,) = per_category(fidelity(0.019, 0.004**2))["fidelity"]
    assert 16 < near < varied
    (other,) = per_category(fidelity(0.019, 0.002**2, "fidelity/0-512.kl <= 0.02"))["fidelity"]
    assert other == 16, "the category that is far from it"


def test_a_level_beyond_its_limit_cannot_be_proved_by_any_number():
    (beyond,) = fidelity(0.021, 0.002**2).too_few
    assert (beyond.needed, beyond.chance) == (None, 0.0)
    assert beyond.wants.endswith("certainty where its screen showed 0.021 nats")
    assert beyond.wider is not None
    assert 0.021 < beyond.wider.value <= 0.024


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", list(Size))
def test_whoever_gives_limits_is_asked_what_proves_them_beyond_a_screen(size):
    limits, suites = parse_limits(["needle >= -10pt"]), asked_suites()
    plan = SuitePlan(size, max_tokens=CONTEXT_TOKENS)
    found = questions_for(suites, plan, limits, keep=False)
    if size is Size.SCREEN:
        assert found == Questions(suites, plan, limits)
    else:
        assert found == proving(suites, plan, limits)
        assert [suite.name for suite in found.suites] == ["needle"]


def test_suites_that_somebody_chose_are_asked_as_well():
    plan, limits = SuitePlan(max_tokens=CONTEXT_TOKENS), parse_limits(["needle >= -10pt"])
    chosen = [suite for suite in asked_suites() if suite.name in ("needle", "tools")]
    found = questions_for(chosen, plan, limits, keep=True)
    assert [suite.name for suite in found.suites] == ["needle", "tools"]
    assert set(found.numbers) == {"needle"}


@pytest.mark.parametrize(("limits", "number"), [(["needle >= -10pt"], 7), ([], None)])
def test_a_number_that_somebody_names_stays_and_without_limits_it_is_the_sizes(limits, number):
    plan, suites = SuitePlan(Size.FULL, per_category=number), asked_suites()
    found = questions_for(suites, plan, parse_limits(limits), keep=False)
    assert found == Questions(suites, plan, parse_limits(limits))


# --- who is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (["needle/single >= -5pt", "kl <= 0.02"], {"fidelity", "needle"}),
        (["worst-instruction >= -5pt"], {"instructions"}),
        (["mean-tools >= -5pt"], {"tools"}),
        (["needle >= -5pt", "broken-output <= 2pt"], {suite.name for suite in asked_suites()}),
        ([], {suite.name for suite in asked_suites()}),
    ],
)
def test_only_suites_that_count_are_asked(limits, names):
    assert {suite.name for suite in questions(*limits).suites} == names


# --- limits that the context leaves nothing for -------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "max_tokens", "message"),
    [
        ("fidelity/1k-2k.kl <= 0.02", 1000, "no item of it fits a context of 1000 tokens"),
        ("needle >= -5pt", 100, "no item of it fits a context of 100 tokens"),
        ("needle/banana >= -5pt", 1000, "needle has no category 'banana'"),
        ("fidelity/1k-2k.kl <= 0.02", 8192, None),
        ("fidelity/1k-2k.kl <= 0.02", None, None),
        ("needle >= -5pt", 1000, None),
    ],
)
def test_a_limit_that_the_context_leaves_no_items_for_is_refused(limit, max_tokens, message):
    given = asked_suites(), SuitePlan(max_tokens=max_tokens), parse_limits([limit])
    if message is None:
        check_limits(*given)
    else:
        with pytest.raises(BadGoal, match=message):
            check_limits(*given)
