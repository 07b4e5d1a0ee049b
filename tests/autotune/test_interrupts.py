"""An interrupt waits for what was measured to be written down, and a second one does not."""

import signal
import threading

import pytest

from kvtune.autotune.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def handlers():
    """Both signals raise KeyboardInterrupt, as they do in the command."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def work(*numbers, held=True, error=None):
    """Signals arrive in the middle of something; returns whether it was done all the same."""
    done = []

    def do():
        interrupts = Interrupts()
        with interrupts.scope():
            if held:
                interrupts.hold()
            for number in numbers:
                signal.raise_signal(number)
            if error is not None:
                raise error
            done.append(True)

    return do, done


@pytest.mark.parametrize("number", SIGNALS)
def test_a_held_interrupt_is_raised_when_the_work_is_done(number):
    do, done = work(number)
    with pytest.raises(KeyboardInterrupt):
        do()
    assert done
    assert signal.getsignal(number) is signal.default_int_handler


def test_before_the_hold_an_interrupt_is_raised_at_once():
    do, done = work(signal.SIGINT, held=False)
    with pytest.raises(KeyboardInterrupt):
        do()
    assert not done


def test_a_hold_that_no_scope_would_end_does_nothing():
    Interrupts().hold()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_while_a_decision_is_saved_the_first_interrupt_is_dropped():
    with Interrupts().first_ignored():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_raised_at_once():
    do, done = work(signal.SIGINT, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        do()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_went_wrong_meanwhile_is_told_rather_than_the_interrupt():
    do, _ = work(signal.SIGINT, error=OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        do()


def test_without_a_signal_nothing_is_raised():
    do, done = work()
    do()
    assert done


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    with interrupts.scope():
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_off_the_main_thread_nothing_is_held():
    interrupts, ended = Interrupts(), []

    def work():
        with interrupts.scope():
            interrupts.hold()
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


def test_work_under_a_hold_can_ask_whether_it_should_end():
    interrupts = Interrupts()
    came = []

    def work():
        with interrupts.scope():
            interrupts.hold()
            came.append(interrupts.came)
            signal.raise_signal(signal.SIGINT)
            came.append(interrupts.came)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [*came, interrupts.came] == [False, True, False]
