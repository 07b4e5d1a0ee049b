"""When a finalist has lost for sure, and the words for whoever is not asked."""

import pytest
from contracts.questions import RIGHT, STANDARD_ITEMS, Words

from kvtune.autotune.quality.answers import Pass, Questions
from kvtune.autotune.quality.proof import NO_MORE, about, lost_for_sure, unprovable
from kvtune.autotune.quality.seen import Seen
from kvtune.autotune.quality.wants import TooFew
from kvtune.profilers.quality.compare import Asked, AskedSuite, compare
from kvtune.profilers.quality.limits import Limit
from kvtune.profilers.quality.suite import Answer, SuitePlan

SUITES = tuple(type(name, (Words,), {"name": name})() for name in ("one", "two", "three", "four"))
QUESTIONS = Questions(SUITES, SuitePlan())
ONCE = Pass("the candidate", 0, 32)


def answered(suite, broken=0):
    """All items of a suite answered alone, the first `broken` of them wrongly."""
    items = suite.items(SuitePlan())
    answers = [Answer(("no" if n < broken else item.prompt,)) for n, item in enumerate(items)]
    own = AskedSuite(name=suite.name, items=items, answers=tuple(answers))
    return Asked(suites=(own,), plan=SuitePlan(), seed=0, concurrency=32, wall_s=1.0)


def together(parts):
    return parts[0].model_copy(update={"suites": tuple(part.suites[0] for part in parts)})


STOCK = together([answered(suite) for suite in SUITES])


def lost(broken):
    known = {"one": answered(SUITES[0], broken)}
    return lost_for_sure(QUESTIONS, "m", ONCE, known, ["one"], STOCK)


def whole_outcome(broken):
    """The outcome once all other suites were answered as the stock defaults do."""
    ours = together([answered(suite, broken * (suite.name == "one")) for suite in SUITES])
    return compare(ours, STOCK, None, suites={suite.name: suite for suite in SUITES}).outcome


def test_it_is_lost_as_soon_as_the_whole_report_would_fail_and_no_sooner():
    found = {broken: lost(broken) is not None for broken in range(0, 40)}
    assert found == {broken: whole_outcome(broken) == "fail" for broken in range(0, 40)}
    alone = Questions(SUITES[:1], SuitePlan())
    few = {"one": answered(SUITES[0], min(broken for broken in found if found[broken]) - 1)}
    assert lost_for_sure(alone, "m", ONCE, few, ["one"], STOCK) is not None, "of fewer figures"


def test_the_report_of_who_lost_has_only_what_was_answered_and_says_so():
    report = lost(STANDARD_ITEMS)
    assert report.outcome == "fail"
    assert {figure.suite for figure in report.figures} == {"one", "any"}
    assert NO_MORE in report.warnings


def too_few(chance, needed=500, wider=0.06):
    wide = wider and Limit("one", RIGHT, wider)
    return TooFew(
        Limit("one", RIGHT, 0.05), needed, 400, chance, "7% of the answers change", "", False, wide
    )


@pytest.mark.parametrize(("chances", "is_asked"), [((0.5,), True), ((0.7, 0.7), False), ((), True)])
def test_whoever_has_an_even_chance_to_prove_all_limits_is_asked(chances, is_asked):
    questions = Questions(SUITES, SuitePlan(), too_few=tuple(map(too_few, chances)))
    assert (unprovable(questions, Seen()) is None) is is_asked


def test_whoever_is_not_asked_reads_what_was_seen_what_it_takes_and_what_would_help():
    questions = Questions(SUITES, SuitePlan(), too_few=(too_few(0.3), too_few(0.2, None, None)))
    seen = Seen(items=97, changed=0.0722, stock=0.01)
    assert unprovable(questions, seen) == (
        "it is not asked as a finalist, as it would hardly prove the limits: its screen showed "
        "7.2% of 97 answers changed (of the stock defaults' by themselves 1%), and "
        "'one.right >= -5pt' would take more items than anybody asks to be proved with some "
        "certainty where 7% of the answers change, and 400 can be asked (and so with 1 more); what "
        "would make it possible: a wider limit, or fewer of them (--quality)"
    )
    nearer = Questions(SUITES, SuitePlan(), too_few=(too_few(0.3),))
    assert "would take 500 items to be proved" in unprovable(nearer, seen)
    assert "a wider limit ('one.right >= -6pt' could be proved)" in unprovable(nearer, seen)


@pytest.mark.parametrize(("time_s", "said"), [(119, "about 119 s"), (121, "about 3 min")])
def test_times_are_told_in_seconds_or_minutes(time_s, said):
    assert about(time_s) == said
