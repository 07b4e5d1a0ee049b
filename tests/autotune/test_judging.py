"""Answers are judged as long as there is time to ask for those that are missing."""

from types import SimpleNamespace

from contracts.landscape import Recorder

from kvtune.autotune.judging import judge_earlier, judge_finalists
from kvtune.autotune.limits import Budget
from kvtune.types import Measurement, Status

BUDGET = Budget(trials=9, finalists=1, confirm_rounds=1)


class Quality:
    """Asks whoever is `unasked` for 100 s each, and judges the others at once."""

    def __init__(self, unasked, left_s):
        self.unasked = unasked
        self.now_left_s = left_s
        self.spent_s = 0.0
        self.judged = []
        self.left_out = []

    def expected_s(self, entries, *, final=True):
        return sum(100.0 for one in entries if one.trial.number in self.unasked)

    def judge(self, entry, *, final=False, left_s=None):
        assert not final or left_s() == self.now_left_s
        asked_s = self.expected_s([entry])
        self.now_left_s -= asked_s
        self.spent_s += asked_s
        self.judged.append(entry.trial.number)

    def leave_out(self, entries, needed_s):
        self.left_out += [(one.trial.number, needed_s) for one in entries]

    def left_s(self):
        return self.now_left_s


def entries(*numbers):
    measurement = Measurement(status=Status.OK, wall_s=10.0)
    return [
        SimpleNamespace(trial=SimpleNamespace(number=number), measurement=measurement)
        for number in numbers
    ]


def test_what_an_earlier_search_left_is_asked_while_the_confirmation_still_fits():
    quality, reporter = Quality(unasked={2, 3, 4}, left_s=219.0), Recorder()
    judge_earlier(entries(1, 2, 3, 4), quality, BUDGET, quality.left_s, reporter)
    assert quality.judged == [1, 2], "then 119 s are left, and the confirmation takes 20 s"
    assert reporter.notes == ["no time is left to ask all that an earlier search left unasked"]


def test_what_needs_no_asking_is_judged_when_the_time_is_over():
    quality, reporter = Quality(unasked=(), left_s=-1.0), Recorder()
    judge_earlier(entries(1, 2), quality, BUDGET, quality.left_s, reporter)
    judge_finalists(entries(3), quality, quality.left_s, reporter)
    assert quality.judged == [1, 2, 3]
    assert reporter.notes == []


def test_finalists_that_cannot_be_asked_in_time_are_left_out_with_what_it_would_take():
    quality, reporter = Quality(unasked={1, 2}, left_s=150.0), Recorder()
    judge_finalists(entries(1, 2, 3), quality, quality.left_s, reporter)
    assert quality.judged == [1, 3]
    assert quality.left_out == [(2, 100.0)]
    assert reporter.notes == ["questions on servers of their own took 100 s"]
