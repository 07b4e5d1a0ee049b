"""Which confirmations nothing passed, and who may still meet the goal after them."""

from types import SimpleNamespace

import pytest
from contracts.landscape import GOAL, failed

from kvtune.autotune.confirm import CONFIRMATION_SEED
from kvtune.autotune.ledger import RUNG_CONFIRM, Entry
from kvtune.autotune.missed import closest, hopeful, miss_text, missed_before
from kvtune.types import Choice, Harm, Measurement, PolicyStack, Status, Trial


def took(ttft_s):
    metrics = {"ttft_p95_s": (ttft_s,), "goodput_requests_per_s": (1.0,)}
    return Measurement(status=Status.OK, metrics=metrics)


def entry(number, measurement, harm=Harm.LOSSLESS, **trial):
    choice = Choice(policy="p", parameters={}, arguments={"n": number}, harm=harm)
    stack = PolicyStack(choices=(choice,) if number else ())
    one = Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0)
    return Entry(one.model_copy(update=trial), measurement, reused=True, sitting="today")


def fell(*ttfts_s, turn=0, numbers=(0, 1), broken=()):
    """The entries of a confirmation: in each round all of these trials took as long."""
    return [
        Entry(
            entry(number, None, parent=number, seed=1 + place + CONFIRMATION_SEED * turn).trial,
            failed() if number in broken else took(ttft_s),
            reused=True,
            rung=RUNG_CONFIRM,
            sitting="today",
        )
        for place, ttft_s in enumerate(ttfts_s)
        for number in numbers
    ]


def missed_in(*entries, met=0.9, rounds=3):
    points = [entry(0, took(2.0)), entry(1, took(met)), entry(2, took(met))]
    ledger = SimpleNamespace(entries=list(entries))
    return missed_before(ledger, GOAL, points, rounds=rounds, seed=0)


def test_a_confirmation_that_nothing_passed_counts_once_it_is_over():
    (found,) = missed_in(*fell(1.1, 1.2, 1.3))
    assert found[1].metrics["ttft_p95_s"] == (1.1, 1.2, 1.3)
    assert missed_in(*fell(1.1, 1.2)) == [], "its third round is missing"
    assert missed_in(*fell(1.1, 1.2, 1.3)[:-1]) == [], "one part of its third round is"
    assert len(missed_in(*fell(1.1, 1.2, 1.3), rounds=8)) == 1, "the first look ends it"


def test_a_confirmation_that_somebody_passed_or_whose_finalists_failed_does_not_count():
    assert missed_in(*fell(0.8, 0.9, 1.1)) == []
    assert missed_in(*fell(1.1, 1.2, 1.3, broken=(1,))) == []


def test_what_missed_the_goal_in_the_search_too_is_no_news():
    assert missed_in(*fell(1.1, 1.2, 1.3), met=1.05) == []


def test_each_confirmation_counts_by_itself_and_the_closest_is_named():
    later = fell(1.05, 1.05, 1.05, turn=1, numbers=(0, 2))
    found = missed_in(*fell(1.1, 1.2, 1.3), *later)
    assert [set(each) for each in found] == [{0, 1}, {0, 2}]
    assert closest(GOAL, found) is found[1]
    assert closest(GOAL, [found[0], found[0].copy()]) is found[0]


@pytest.mark.parametrize(("ttft_s", "is_hopeful"), [(0.74, True), (0.76, False)])
def test_others_need_as_much_room_as_those_that_missed_it(ttft_s, is_hopeful):
    # 0.9 s became 1.2 s: a third more, so 0.75 s become 1 s.
    points = [entry(1, took(0.9)), entry(2, took(ttft_s))]
    found = hopeful(GOAL, points, {1: took(1.2)})
    assert [one.trial.number for one in found] == ([2] if is_hopeful else [])


def test_what_does_another_harm_is_not_judged_by_them_and_lighter_requests_help_nobody():
    points = [entry(1, took(0.9)), entry(2, took(0.95), Harm.NEAR_LOSSLESS)]
    assert [one.trial.number for one in hopeful(GOAL, points, {1: took(1.2)})] == [2]
    points = [entry(1, took(1.5)), entry(2, took(1.1)), entry(3, failed())]
    assert hopeful(GOAL, points, {1: took(1.2)}) == []


def test_why_they_are_out_is_said_with_what_was_measured():
    said = miss_text(GOAL, took(1.25))
    assert said == "when it was confirmed, p95 ttft <= 1s was missed: measured 1.25 s"
    assert miss_text(GOAL, failed()) == "crash-under-load: it died"
