"""A search goes on with what was asked before, and lives through servers that die of questions."""

import signal

from contracts.questions import (
    ONLY_KV_DTYPE,
    SCREEN_ITEMS,
    STANDARD_ITEMS,
    More,
    Words,
    harmful,
    is_harmful,
)

from kvtune.autotune.limits import QualityRules
from kvtune.profilers.quality.suite import Size
from kvtune.types import Failure, FailureClass, Outcome, Status

CRASH = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it died")


# --- going on -------------------------------------------------------------------------------------


def test_the_same_command_again_asks_nothing(questioned_search, questioned):
    first = questioned_search().run()
    before = len(questioned.asked)
    assert questioned_search().run() == first
    assert len(questioned.asked) == before
    assert questioned.launched == [ONLY_KV_DTYPE]


def test_what_another_study_measured_is_asked_on_a_server_of_its_own(questioned_search, questioned):
    questioned_search(quality=None).run()
    questioned_search(quality=QualityRules(size=Size.SCREEN), name="other").run()
    assert [is_harmful(arguments) for arguments in questioned.launched] == [False, True, True]


def test_what_another_study_asked_is_not_asked_again(questioned_search, questioned, store):
    questioned_search().run()
    before = len(questioned.asked)
    other = questioned_search(name="other")
    decision = other.run()
    assert decision.outcome is Outcome.WINNER
    assert len(questioned.asked) == before
    assert store.quality_reports("other"), "but it is judged there too"


def test_remeasuring_takes_no_answers_from_before(questioned_search, questioned):
    questioned_search().run()
    stock, others = questioned.items_by_settings
    questioned_search(name="other", remeasure=True).run()
    assert questioned.items_by_settings == (2 * stock, 2 * others)


def test_an_interrupt_while_asking_keeps_the_measurement_and_later_only_the_rest_is_asked(
    questioned_search, questioned, store, monkeypatch
):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(), More()))

    def interrupt(server):
        if is_harmful(server.arguments):
            signal.raise_signal(signal.SIGINT)

    questioned.meanwhile = interrupt
    stopped = questioned_search(explore_lossy=True)
    decision = stopped.run()
    assert stopped.interrupted
    assert decision.recommended == 0
    (number,) = harmful(stopped)
    assert store.trial(stopped.study, number).measurement.status is Status.OK
    assert "was not asked the questions of quality" in decision.rejected[number]
    assert any("the questions were interrupted" in note for note in stopped.reporter.notes)

    questioned.meanwhile = lambda server: None
    before = len(questioned.asked)
    onward = questioned_search(explore_lossy=True)
    assert onward.run().outcome is Outcome.WINNER
    first = questioned.asked[before]
    assert first.own_server
    assert first.arguments == store.trial(onward.study, number).trial.arguments
    again = [
        one
        for one in questioned.asked[before:]
        if not is_harmful(one.arguments) and len(one.keys) == 2 * SCREEN_ITEMS
    ]
    assert again == [], "the defaults' answers to the screen were kept"


def test_an_interrupt_of_a_finalist_costs_the_suite_under_way(
    questioned_search, questioned, monkeypatch
):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(), More()))
    finals = []

    def interrupt(server):
        if is_harmful(server.arguments) and len(questioned.asked[-1].keys) == STANDARD_ITEMS:
            finals.append(server)
            if len(finals) == 2:
                signal.raise_signal(signal.SIGINT)

    questioned.meanwhile = interrupt
    stopped = questioned_search(explore_lossy=True)
    assert stopped.run().recommended == 0
    assert stopped.interrupted
    questioned.meanwhile = lambda server: None
    before = len(questioned.asked)
    assert questioned_search(explore_lossy=True).run().outcome is Outcome.WINNER
    first, *again = questioned.asked[before:]
    assert first.keys[0].startswith("more-")
    assert is_harmful(first.arguments)
    assert [(is_harmful(one.arguments), one.seed) for one in again] == [(False, 1)] * 2


# --- servers that do not live through it ------------------------------------------------------


def test_a_server_that_dies_of_the_questions_keeps_its_figures_and_is_out(
    questioned_search, questioned, store
):
    def die(server):
        if is_harmful(server.arguments):
            server.died = CRASH

    questioned.meanwhile = die
    tuning = questioned_search(explore_lossy=True)
    decision = tuning.run()
    assert decision.recommended == 0
    for number in harmful(tuning):
        measurement = store.trial(tuning.study, number).measurement
        assert measurement.status is Status.OK
        assert measurement.metrics["goodput_requests_per_s"] == (9.0,)
        assert measurement.asked_s > 0
        assert decision.rejected[number] == (
            "while it was asked the questions of quality, after its load: crash-under-load: it died"
        )


def test_a_finalist_that_dies_of_the_questions_is_out_and_asked_no_more(
    questioned_search, questioned
):
    def die(server):
        if is_harmful(server.arguments) and len(questioned.asked[-1].keys) == STANDARD_ITEMS:
            server.died = CRASH

    questioned.meanwhile = die
    tuning = questioned_search(explore_lossy=True)
    decision = tuning.run()
    assert decision.recommended == 0
    assert sum("after its load: crash" in why for why in decision.rejected.values()) == 1
    finals = [one for one in questioned.asked if len(one.keys) == STANDARD_ITEMS]
    assert sum(is_harmful(one.arguments) for one in finals) == 1, "of two rounds"


def test_defaults_that_die_of_the_questions_stay_measured_and_vouch_for_nothing(
    questioned_search, questioned, store
):
    def die(server):
        if not is_harmful(server.arguments):
            server.died = CRASH

    questioned.meanwhile = die
    tuning = questioned_search(explore_lossy=True)
    decision = tuning.run()
    assert store.trial(tuning.study, 0).measurement.status is Status.OK
    assert decision.recommended == 0
    for number in harmful(tuning):
        assert decision.rejected[number] == (
            "the stock defaults could not be asked the questions of quality at screen size: "
            "crash-under-load: it died"
        )


def test_servers_that_cannot_be_started_for_questions_leave_trials_unproved(
    questioned_search, questioned, monkeypatch
):
    def refuse(server):
        server.died = CRASH

    questioned_search(quality=None).run()
    questioned.meanwhile = refuse
    tuning = questioned_search(name="other")
    decision = tuning.run()
    assert decision.recommended == 0
    assert len(questioned.launched) == 1, "the defaults are not started for every trial again"
