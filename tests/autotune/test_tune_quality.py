"""A search recommends what may change answers only if the quality suites vouch for it."""

import re
from dataclasses import replace

import pytest
from contracts.landscape import ONLY_BLOCK_SIZE, WRONG
from contracts.questions import (
    ONE_POINT,
    ONLY_KV_DTYPE,
    SCREEN_ITEMS,
    STANDARD_ITEMS,
    More,
    Words,
    harmful,
    is_harmful,
)

from kvtune.autotune.handover import serving_config
from kvtune.autotune.limits import Budget, QualityRules
from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY
from kvtune.autotune.quality.proof import NO_MORE
from kvtune.autotune.quality.words import NOT_ASKED
from kvtune.errors import BadGoal
from kvtune.profilers.quality.suite import Size
from kvtune.types import Outcome


def garbage(arguments, item):
    return "rursrs" if is_harmful(arguments) else item.prompt


# --- what is asked, and where -------------------------------------------------------------------


def test_everybody_is_asked_at_the_servers_that_are_measured(questioned_search, questioned):
    questioned_search(explore_lossy=True).run()
    assert questioned.launched == []
    asked = [
        (is_harmful(one.arguments), len(one.keys), one.seed, one.concurrency)
        for one in questioned.asked
    ]
    screen, standard = SCREEN_ITEMS, STANDARD_ITEMS
    assert asked == [
        (False, screen, 0, CONCURRENCY),
        (False, screen, 1, AGAIN_CONCURRENCY),
        (True, screen, 0, CONCURRENCY),
        (True, screen, 0, CONCURRENCY),
        (False, standard, 0, CONCURRENCY),
        (True, standard, 0, CONCURRENCY),
        (False, standard, 1, AGAIN_CONCURRENCY),
    ], "the defaults twice at each size, two trials, one finalist; a restart before the last time"


def test_the_defaults_are_asked_only_once_something_may_change_answers(
    questioned_search, questioned
):
    tuning = questioned_search(base=ONLY_BLOCK_SIZE, budget=Budget(trials=3, confirm_rounds=2))
    tuning.run()
    assert harmful(tuning) == []
    assert questioned.asked == []


def test_without_being_told_to_explore_the_defaults_are_asked_on_a_server_of_their_own(
    questioned_search, questioned
):
    questioned_search().run()
    assert questioned.launched == [ONLY_KV_DTYPE]
    on_own = [one for one in questioned.asked if one.own_server]
    assert [(one.seed, is_harmful(one.arguments)) for one in on_own] == [(0, False), (1, False)]


def test_without_quality_only_the_canary_is_asked_and_the_decision_says_so(
    questioned_search, questioned
):
    questioned.say = garbage
    tuning = questioned_search(quality=None)
    decision = tuning.run()
    assert questioned.asked == []
    assert decision.recommended in harmful(tuning)
    assert NOT_ASKED in decision.reasons


def test_the_time_of_asking_belongs_to_the_trial(questioned_search, questioned, store):
    tuning = questioned_search(explore_lossy=True)
    clock = iter(range(0, 10**6, 5)).__next__
    tuning.quality.bench = replace(tuning.bench, clock=clock)
    tuning.run()
    for number in (0, *harmful(tuning)):
        measurement = store.trial(tuning.study, number).measurement
        assert (measurement.asked_s, measurement.wall_s) == (5.0, 6.0)


# --- what comes of it -----------------------------------------------------------------------------


def test_settings_that_fail_the_screen_are_never_recommended(
    questioned_search, questioned, store, landscape
):
    questioned.say = garbage
    tuning = questioned_search()
    decision = tuning.run()
    out = harmful(tuning)
    assert len(out) == 2
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert decision.recommended == 0
    assert not set(out) & set(landscape.confirmed)
    for number in out:
        assert decision.rejected[number].startswith(
            "quality, screen size: worse than allowed: words/one right, -100pt ("
        )
        (row,) = store.quality_reports(tuning.study, number)
        assert (row.report.outcome, row.report.size) == ("fail", "screen")
        assert "--kv-cache-dtype" in row.report.candidate


def test_a_finalist_that_passes_wins_and_the_reasons_say_how_it_answered(questioned_search, store):
    tuning = questioned_search()
    decision = tuning.run()
    assert decision.outcome is Outcome.WINNER
    assert decision.recommended in harmful(tuning)
    (said,) = [reason for reason in decision.reasons if reason.startswith("quality, ")]
    assert said.startswith(
        "quality, standard size: no category is worse than its limit; the worst, "
        "words/one right, 0pt ("
    )
    sizes = [row.report.size for row in store.quality_reports(tuning.study, decision.recommended)]
    assert sizes == ["standard", "screen"]
    (warning,) = [w for w in serving_config(store, tuning.study).warnings if "near-lossless" in w]
    assert said in warning


def test_settings_that_cannot_prove_a_limit_are_not_asked_as_finalists(
    questioned_search, questioned
):
    tuning = questioned_search(quality=QualityRules(limits=(ONE_POINT,)))
    decision = tuning.run()
    assert decision.outcome is Outcome.KEEP_BASELINE
    assert {len(one.keys) for one in questioned.asked} == {SCREEN_ITEMS}
    for number in harmful(tuning):
        said = decision.rejected[number]
        assert said.startswith("it is not asked as a finalist, as it would hardly prove the limits")
        assert "'words.right >= -1pt' would take " in said
        assert f"and {STANDARD_ITEMS} can be asked" in said
        assert f"trial {number} is out: {said}" in tuning.reporter.notes


def test_a_finalist_whose_items_prove_nothing_is_out_with_the_number_that_could(
    questioned_search, questioned
):
    def say(arguments, item):
        number = int(item.prompt.removeprefix("word "))
        unlucky = is_harmful(arguments) and number in range(SCREEN_ITEMS, SCREEN_ITEMS + 4)
        return "no" if unlucky else item.prompt

    questioned.say = say
    tuning = questioned_search()
    decision = tuning.run()
    assert decision.outcome is Outcome.KEEP_BASELINE
    (said,) = {
        decision.rejected[number]
        for number in harmful(tuning)
        if decision.rejected[number] != "not among those that were confirmed"
    }
    assert said.startswith("quality, standard size: not enough evidence for words/one right")
    assert re.search(rf": [0-9]+ items needed of .*, which had {STANDARD_ITEMS}; ", said)
    assert said.endswith("; --quality-size full asks more")


def test_a_finalist_that_has_lost_for_sure_is_asked_no_further(
    questioned_search, questioned, store, monkeypatch
):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(), More()))

    def say(arguments, item):
        number = int(item.prompt.removeprefix("word "))
        return "no" if is_harmful(arguments) and number >= SCREEN_ITEMS else item.prompt

    questioned.say = say
    tuning = questioned_search()
    decision = tuning.run()
    assert decision.recommended == 0
    finals = [one for one in questioned.asked if len(one.keys) == STANDARD_ITEMS]
    assert [(is_harmful(one.arguments), one.keys[0], one.seed) for one in finals] == [
        (False, "words-0", 0),
        (False, "more-0", 0),
        (True, "words-0", 0),
    ], "neither its other suite nor the second time of the stock defaults"
    (number,) = [n for n, why in decision.rejected.items() if "standard size" in why]
    assert decision.rejected[number].startswith(
        "quality, standard size: worse than allowed: words/one right, -87pt ("
    )
    assert "limit 5pt" in decision.rejected[number]
    report = store.quality_reports(tuning.study, number)[0].report
    assert (report.size, report.outcome) == ("standard", "fail")
    assert NO_MORE in report.warnings
    assert any(note.endswith(NO_MORE) for note in tuning.reporter.notes)
    before = len(questioned.asked)
    again = questioned_search().run()
    assert again.rejected[number] == decision.rejected[number]
    lost = tuning.store.trial(tuning.study, number).trial.arguments
    assert lost not in [one.arguments for one in questioned.asked[before:]]


@pytest.mark.parametrize("limits", [(), (ONE_POINT,)])
def test_where_only_a_screen_is_asked_limits_have_to_be_proved_all_the_same(
    limits, questioned_search, questioned
):
    tuning = questioned_search(quality=QualityRules(limits, size=Size.SCREEN))
    decision = tuning.run()
    assert questioned.items_by_settings == (2 * SCREEN_ITEMS, 2 * SCREEN_ITEMS)
    assert decision.recommended == 0
    assert all("not enough evidence" in decision.rejected[number] for number in harmful(tuning))


def test_lossless_settings_win_when_the_answers_of_faster_ones_are_not_proved(
    questioned_search, landscape, store
):
    def goodput(arguments):
        return 9.0 if is_harmful(arguments) else {32: 3.0}.get(arguments.get("block-size"), 1.0)

    landscape.goodput = goodput
    tuning = questioned_search(
        base=ONLY_BLOCK_SIZE,
        budget=Budget(trials=12, finalists=2, confirm_rounds=2),
        quality=QualityRules(limits=(ONE_POINT,)),
        explore_lossy=True,
    )
    decision = tuning.run()
    assert decision.outcome is Outcome.WINNER
    winner = store.trial(tuning.study, decision.recommended).trial
    assert winner.stack.arguments == {"block-size": 32}


def test_what_was_not_confirmed_is_not_recommended_unproved(questioned_search, landscape):
    landscape.interrupt_at = 3
    tuning = questioned_search()
    decision = tuning.run()
    assert landscape.confirmed == []
    assert decision.recommended == 0
    for number in harmful(tuning):
        assert (
            "was not asked the questions of quality at standard size" in (decision.rejected[number])
        )


def test_where_a_limit_cannot_be_judged_only_lossless_settings_are_tried(
    questioned_search, questioned, landscape, monkeypatch
):
    def refuse(*about):
        raise BadGoal("words has no category 'one' within 128 tokens", "leave it out")

    monkeypatch.setattr("kvtune.autotune.quality.asking.check_limits", refuse)
    tuning = questioned_search(base=ONLY_BLOCK_SIZE, budget=Budget(trials=12), explore_lossy=True)
    tuning.run()
    assert harmful(tuning) == []
    assert len(landscape.points) == 4, "all block sizes"
    assert questioned.asked == []
    why = "quality cannot be judged here: words has no category 'one' within 128 tokens"
    assert f"settings that may change answers are not tried any more: {why}" in (
        tuning.reporter.notes
    )


def test_the_canary_is_asked_before_all_else(questioned_search, landscape):
    landscape.canary = lambda arguments: (
        WRONG if is_harmful(arguments) else ("7194", "5823", "3461")
    )
    tuning = questioned_search()
    decision = tuning.run()
    assert all("in a long prompt" in decision.rejected[number] for number in harmful(tuning))


def test_levers_are_told_of_a_limit_on_scores_of_given_texts(questioned_search, monkeypatch):
    monkeypatch.setattr(Words, "scores", True)
    for limits, said in (((), ""), ((ONE_POINT,), "words.right >= -1pt")):
        tuning = questioned_search(quality=QualityRules(limits=limits))
        tuning.run()
        assert tuning.exploration.context.scores_limit == said
    tuning = questioned_search(quality=None)
    tuning.run()
    assert tuning.exploration.context.scores_limit == ""
