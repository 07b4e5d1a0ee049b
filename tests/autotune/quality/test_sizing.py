"""What has to be asked so that limits can be proved, with the suites that are shipped."""

from collections import Counter

import pytest

from kvtune.autotune.quality.answers import Questions
from kvtune.autotune.quality.sizing import asked_suites, check_limits, proving
from kvtune.errors import BadGoal
from kvtune.profilers.quality import gate
from kvtune.profilers.quality.figures import Row
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, parse_limits
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


@pytest.mark.parametrize("size", [Size.STANDARD, Size.FULL])
@pytest.mark.parametrize("limits", [(), README_LIMITS])
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


def test_what_one_suite_needs_is_not_asked_of_another():
    asked = questions("needle >= -1pt", "worst-instruction >= -5pt")
    found = {
        suite.name: set(Counter(i.category for i in suite.items(asked.plan_of(suite))).values())
        for suite in asked.suites
    }
    # 268 and 52 without a changed item, and three tenths more
    assert found == {"instructions": {68}, "needle": {349}}


@pytest.mark.parametrize(
    ("limits", "about"),
    [(README_LIMITS, 1300), ((), 2100), (("needle >= -1pt",), 2100)],
)
def test_what_the_readme_says_of_the_number_of_items_is_so(limits, about):
    assert questions(*limits).count == pytest.approx(about, abs=50)


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
