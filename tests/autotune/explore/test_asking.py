"""A search waits for no proposer that hangs, and loses nothing of what it says later."""

from threading import Event

import pytest

from kvtune.autotune.explore.asking import Asking, TooLate

SOON_S = 0.05


class Proposer:
    """Remembers what it was told; `gate` holds it up."""

    def __init__(self):
        self.seen, self.gate = [], Event()

    def observe(self, observation):
        self.seen.append(observation)


@pytest.fixture
def proposer():
    return Proposer()


@pytest.fixture
def asking(proposer):
    made = Asking(proposer, limit_s=SOON_S)
    yield made
    proposer.gate.set()
    made.end()


def hang(proposer):
    proposer.gate.wait()
    return "late"


def test_answers_come_after_what_was_told_before(asking):
    asking.tell("one")
    asking.tell("two")
    assert asking.ask(lambda proposer: list(proposer.seen)) == ["one", "two"]


def test_who_takes_too_long_is_not_waited_for(asking):
    with pytest.raises(TooLate, match=r"no answer in 0\.05 s"):
        asking.ask(hang)


def test_nobody_waits_again_until_the_late_answer_is_there(asking, proposer):
    with pytest.raises(TooLate):
        asking.ask(hang)
    asking.tell("meanwhile")
    with pytest.raises(TooLate, match="no answer"):
        asking.ask(lambda proposer: "never asked")
    proposer.gate.set()
    asking._late.result()
    assert asking.ask(lambda proposer: list(proposer.seen)) == ["meanwhile"]


def test_what_goes_wrong_is_raised_where_it_was_asked(asking):
    with pytest.raises(ZeroDivisionError):
        asking.ask(lambda proposer: 1 / 0)
    assert asking.ask(lambda proposer: "still there") == "still there"
