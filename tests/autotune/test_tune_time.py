"""A search asks about quality within its time, and leaves what it has no time to ask about."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.landscape import ONLY_BLOCK_SIZE, failed
from contracts.questions import STANDARD_ITEMS, More, Words, harmful, is_harmful

from kvtune.autotune.limits import Budget, QualityRules, Sampler
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.types import FailureClass, Harm, Outcome

SMALL_BLOCKS = {"block-size": 32}
NO_TIME = "no time was left for the questions of quality"


@pytest.fixture
def search(tuning_on, questioned, landscape, monkeypatch):
    """A search whose questions take `item_s` an item of the search's own clock."""
    landscape.goodput = lambda arguments: (
        9.0 if is_harmful(arguments) else {32: 3.0}.get(arguments.get("block-size"), 1.0)
    )
    landscape.trial_s = 10.0
    clock = SimpleNamespace(perf_counter=landscape.clock)
    monkeypatch.setattr("kvtune.profilers.quality.compare.time", clock)

    def make(time_s, *, item_s=0.0, trials=12, **rules):
        def take(server):
            landscape.now_s += item_s * len(questioned.asked[-1].keys)

        questioned.meanwhile = take
        tuning = tuning_on(
            base=ONLY_BLOCK_SIZE,
            budget=Budget(trials=trials, time_s=time_s, finalists=1, confirm_rounds=2),
            quality=QualityRules(),
            engine=questioned.engine,
            sampler=Sampler.TPE,  # It stops for nothing but the budget, which is tested here.
            **rules,
        )
        tuning.quality.bench = replace(tuning.bench, clock=landscape.clock)
        return tuning

    return make


def winner(tuning, decision):
    assert decision.outcome is Outcome.WINNER
    return tuning.store.trial(tuning.study, decision.recommended).trial


# --- with the estimates of the search itself -----------------------------------------------------


def test_a_finalist_is_asked_in_the_time_that_was_kept_for_it(search, landscape, questioned):
    tuning = search(400.0, item_s=0.1, explore_lossy=True)
    decision = tuning.run()
    assert is_harmful(winner(tuning, decision).arguments)
    assert [len(one.keys) for one in questioned.asked[-3:]] == [STANDARD_ITEMS] * 3
    assert landscape.now_s <= 400.0
    assert not any(NO_TIME in reason for reason in decision.rejected.values())


def test_where_the_first_screen_shows_that_time_cannot_suffice_lossless_settings_win(
    search, landscape
):
    tuning = search(500.0, item_s=2.0, explore_lossy=True)
    decision = tuning.run()
    assert winner(tuning, decision).stack.arguments == SMALL_BLOCKS
    assert landscape.now_s <= 500.0
    (number,) = harmful(tuning)
    said = decision.rejected[number]
    assert said.startswith(f"{NO_TIME} at standard size: its screen showed 0% of 20 answers")
    assert "a proof takes 150 items of it" in said
    assert "about 16 min" in said, "three times 150 items, which take about 2 s each"
    assert "more --budget-time" in said
    (note,) = [note for note in tuning.reporter.notes if "may change answers are not" in note]
    assert note.endswith("no time is left to ask them the questions of quality")


def test_what_there_is_no_time_to_ask_about_is_not_even_tried(search, landscape, questioned):
    landscape.ttft_s = lambda arguments: 2.0  # Beyond the goal, so that all levers are wanted.
    tuning = search(100.0, item_s=0.1)
    tuning.run()
    assert harmful(tuning) == []
    assert questioned.asked == []
    assert landscape.confirmed
    assert any("may change answers are not tried" in note for note in tuning.reporter.notes)


@pytest.mark.parametrize(
    ("time_s", "item_s", "explore_lossy"),
    [  # Each value of one beside each of another.
        (100.0, 0.01, False),
        (100.0, 0.5, True),
        (330.0, 0.01, True),
        (330.0, 0.5, False),
        (700.0, 0.01, False),
        (700.0, 0.5, True),
    ],
)
def test_the_time_budget_is_kept_whatever_an_item_takes(
    time_s, item_s, explore_lossy, search, landscape
):
    if not explore_lossy:
        landscape.ttft_s = lambda arguments: 2.0  # Beyond the goal, so that all levers are wanted.
    tuning = search(time_s, item_s=item_s, explore_lossy=explore_lossy)
    tuning.run()
    assert landscape.now_s <= time_s
    assert landscape.confirmed
    assert harmful(tuning) or time_s == 100.0, "else all of it happened without a question"


def test_no_time_is_spent_on_settings_whose_baseline_failed(search, landscape, questioned):
    landscape.goodput = lambda arguments: (
        9.0 if is_harmful(arguments) else failed(FailureClass.DOES_NOT_FIT, "too small")
    )
    tuning = search(None, explore_lossy=True)
    decision = tuning.run()
    assert questioned.asked == []
    assert decision.outcome is Outcome.NOTHING_MEASURED
    assert set(harmful(tuning)) < set(decision.rejected)


# --- with estimates that are given -----------------------------------------------------------


def test_the_time_to_ask_finalists_is_set_aside(search, landscape, monkeypatch):
    def expected_s(quality, entries, *, newcomers=0, final=True):
        return 300.0 * (final and (newcomers > 0 or any(map(may_harm, entries))))

    monkeypatch.setattr(TrialQuality, "expected_s", expected_s)
    search(385.0, explore_lossy=True).run()
    assert len(landscape.points) == 4, "385 s hold 300 s of questions, four trials and four runs"
    assert landscape.confirmed


def test_whoever_would_have_been_confirmed_is_left_out_for_time_and_the_next_best_is_looked_at(
    search, landscape, monkeypatch
):
    def expected_s(quality, entries, *, newcomers=0, final=True):
        is_over = len(landscape.points) == 12
        asked = newcomers > 0 or any(map(may_harm, entries))
        return 400.0 * (final and is_over and asked)

    monkeypatch.setattr(TrialQuality, "expected_s", expected_s)
    tuning = search(500.0, explore_lossy=True)
    decision = tuning.run()
    assert winner(tuning, decision).stack.arguments == SMALL_BLOCKS
    assert not set(harmful(tuning)) & set(landscape.confirmed)
    said = [decision.rejected[number] for number in harmful(tuning)]
    assert len(said) > 1
    assert all(NO_TIME in each and "about 7 min" in each for each in said)


# --- when finalists take longer than was thought ----------------------------------------------


@pytest.fixture
def slow_finals(search, questioned, landscape, monkeypatch):
    """A search whose finalists' second suite takes a hundred times as long as all else."""
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(), More()))

    def make(time_s):
        tuning = search(time_s, explore_lossy=True, trials=6)

        def take(server):
            keys = questioned.asked[-1].keys
            is_slow = keys[0].startswith("more") and len(keys) == STANDARD_ITEMS
            landscape.now_s += len(keys) * (10.0 if is_slow else 0.1)

        questioned.meanwhile = take
        return tuning

    return make


def test_a_finalist_that_takes_longer_than_there_is_time_is_asked_no_further(
    slow_finals, landscape, questioned
):
    decision = slow_finals(2500.0).run()
    assert decision.recommended == 0
    assert landscape.now_s <= 2500.0
    finals = [one for one in questioned.asked if len(one.keys) == STANDARD_ITEMS]
    assert [one.keys[0] for one in finals] == ["words-0", "more-0"], "the stock defaults once"
    said = [why for why in decision.rejected.values() if "no time was left to finish" in why]
    assert len(said) == 1
    assert "the same command goes on from there" in said[0]


def test_the_same_command_goes_on_where_a_finalist_was_asked_no_further(slow_finals, questioned):
    slow_finals(2500.0).run()
    before = len(questioned.asked)
    decision = slow_finals(None).run()
    assert [(is_harmful(one.arguments), one.keys[0]) for one in questioned.asked[before:]] == [
        (True, "words-0"),
        (True, "more-0"),
        (False, "words-0"),
        (False, "more-0"),
    ], "what the stock defaults answered the first time is kept"
    assert decision.outcome is Outcome.WINNER


def may_harm(entry):
    return entry.trial.stack.harm is not Harm.LOSSLESS
