"""What a search may hold answers against, and what asking will take."""

import math
import re
from dataclasses import replace

import pytest
from contracts.landscape import workload
from contracts.questions import ITEMS, RIGHT, SCREEN_ITEMS, STANDARD_ITEMS, Questioned, Words
from contracts.store_values import a_quality_report

from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality.answers import AGAIN_CONCURRENCY, CONCURRENCY
from kvtune.autotune.quality.prices import ITEM_S
from kvtune.autotune.quality.sizing import (
    MOST_PER_CATEGORY,
    asked_suites,
    read_limits,
)
from kvtune.errors import BadGoal
from kvtune.profilers.quality.limits import ANY, BROKEN_OUTPUT, Limit
from kvtune.profilers.quality.suite import Item, Size
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Harm,
    Measurement,
    PolicyStack,
    Status,
    Trial,
)


def entry(number, harm=Harm.NEAR_LOSSLESS):
    choice = Choice(policy="p", parameters={}, arguments={"kv-cache-dtype": number}, harm=harm)
    trial = Trial(
        number=number,
        stack=PolicyStack(choices=(choice,)),
        base_arguments={},
        repeats=1,
        seed=0,
    )
    return Entry(trial, Measurement(status=Status.OK), reused=True)


def replace_start(measured, start_s):
    """The entry of a trial whose server took so long to start."""
    update = {"start_s": start_s}
    return replace(measured, measurement=measured.measurement.model_copy(update=update))


@pytest.fixture
def questioned(monkeypatch):
    """Whom the trials of a test ask."""
    made = Questioned()
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Words(),))
    monkeypatch.setattr("kvtune.autotune.quality.subjects.ServerAsker", made.asker)
    return made


@pytest.fixture
def quality_of(tuning_on, landscape, store, questioned):
    """The quality of a study's trials, given reports of (trial, size, outcome)."""

    def make(*reports, rules=QualityRules(), name="s", base=None, unanswered=0, **options):  # noqa: B008
        study = tuning_on(name=name, base=base).study
        for trial, size, outcome in reports:
            found = a_quality_report(outcome=outcome, size=size, wall_s=10.0, unanswered=unanswered)
            store.save_quality_report(found, study=study, trial=trial)
        tuning = tuning_on(name=name, base=base, quality=rules, engine=questioned.engine, **options)
        return tuning.quality

    return make


# --- limits -------------------------------------------------------------------------------------


def test_limits_are_read_as_kvtune_quality_reads_them():
    texts = ["needle >= -1pt", "kl <= 0.02 and worst-instruction >= -2pt"]
    limits = read_limits(texts, Size.STANDARD, workload())
    assert [(one.suite, one.metric.name, one.value) for one in limits] == [
        ("needle", "recall", 0.01),
        ("fidelity", "kl", 0.02),
        ("instructions", "followed", 0.02),
    ]


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("needle/multikey >= -1pt", Size.STANDARD, "needle has no category 'multikey'"),
        ("fidelity/1k-2k.kl <= 0.02", Size.SCREEN, "fidelity has no category '1k-2k' at screen"),
        ("any/some.broken-output <= 1pt", Size.STANDARD, "any has no category 'some'"),
        ("yours >= -1pt", Size.STANDARD, "unknown suite or metric 'yours'"),
    ],
)
def test_a_limit_on_what_is_not_asked_is_refused(text, size, message):
    with pytest.raises(BadGoal, match=message):
        read_limits([text], size, workload())


def test_a_category_may_be_named_in_any_case():
    (limit,) = read_limits(["Needle/Multi-Key >= -1pt"], Size.SCREEN, workload())
    assert limit.category == "multi-key"
    assert read_limits(["fidelity/1k-2k.kl <= 0.02"], Size.STANDARD, workload())


def test_the_suite_that_needs_data_is_not_asked():
    names = [suite.name for suite in asked_suites()]
    assert "yours" not in names
    assert {"needle", "fidelity", "instructions"} <= set(names)


# --- the context ------------------------------------------------------------------------------


class Contexts(Words):
    """Words of which some need 1000 tokens."""

    def items(self, plan):
        fits = plan.max_tokens is None or plan.max_tokens >= 1000
        long = [Item(f"long-{n}", "long", prompt="word") for n in range(20)]
        return (*super().items(plan), *(long if fits else ()))


def measured_with(tokens):
    effective = EffectiveConfig(max_model_len_tokens=tokens)
    return Measurement(status=Status.OK, effective=effective)


def at_stock(quality, questioned, tokens):
    """Ask the stock server, which says that it has so many tokens of context."""
    stock = Trial(number=0, stack=PolicyStack(), base_arguments={}, repeats=1, seed=0)
    return quality.at_server(stock, questioned.serve({}), measured_with(tokens))


@pytest.fixture
def with_contexts(monkeypatch, quality_of):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Contexts(),))
    return quality_of


@pytest.mark.parametrize(("tokens", "items"), [(999, SCREEN_ITEMS), (1000, SCREEN_ITEMS + 20)])
def test_questions_fit_the_context_that_the_stock_server_told(
    tokens, items, with_contexts, questioned
):
    at_stock(with_contexts(base={"max-model-len": "1k"}), questioned, tokens)
    assert [len(one.keys) for one in questioned.asked] == [items, items]


@pytest.mark.parametrize(("tokens", "is_refused"), [(999, True), (1000, False)])
def test_limits_that_the_context_leaves_nothing_for_are_refused_once_it_is_known(
    tokens, is_refused, with_contexts, questioned
):
    limit = Limit("words", RIGHT, 0.05, category="long")
    quality = with_contexts(rules=QualityRules(limits=(limit,)))
    measurement = at_stock(quality, questioned, tokens)
    assert measurement.status is Status.OK
    assert bool(questioned.asked) is not is_refused
    assert (quality.refusal() is not None) is is_refused
    if is_refused:
        assert "'words/long.right >= -5pt': no item of it fits" in quality.refusal()
        quality.judge(entry(1))
        assert quality.objection(entry(1).trial) == quality.refusal()
        assert quality.expected_s([entry(1)], final=False) == 0.0
        assert questioned.launched == []


# --- what asking will take ----------------------------------------------------------------------


def test_finalists_take_as_long_as_an_item_of_a_screen_did(quality_of):
    known = quality_of((1, "screen", "unclear"), (2, "screen", "unclear"))
    an_item_s = 10.0 / SCREEN_ITEMS
    assert known.expected_s([entry(1), entry(2), entry(3, Harm.LOSSLESS)]) == pytest.approx(
        (2 + 2) * STANDARD_ITEMS * an_item_s, rel=0.01
    ), "two finalists once each, and the stock defaults twice"
    assert known.expected_s([entry(3, Harm.LOSSLESS)]) == 0.0


def test_nothing_is_expected_of_what_is_known(quality_of):
    done = quality_of((1, "screen", "unclear"), (1, "standard", "pass"))
    assert done.expected_s([entry(1)]) == 0.0


def test_an_item_takes_what_is_stated_until_one_was_asked(quality_of):
    assert quality_of().expected_s([entry(1)]) == 3 * STANDARD_ITEMS * ITEM_S
    assert quality_of().expected_s([], newcomers=2) == 4 * STANDARD_ITEMS * ITEM_S


def test_a_screen_after_the_measurement_takes_servers_of_its_own(quality_of):
    measured = [replace_start(entry(number), 7.0) for number in (1, 2)]
    expected_s = quality_of().expected_s(measured, final=False)
    assert expected_s == 4 * SCREEN_ITEMS * ITEM_S + 3 * 7.0


def test_what_is_kept_of_the_answers_is_not_expected_again(quality_of, questioned):
    quality = quality_of()
    quality.judge(entry(1))
    assert questioned.launched == [{}, {"kv-cache-dtype": 1}]
    other = quality_of(name="other")
    assert other.expected_s([entry(1)], final=False) == 0.0
    assert other.expected_s([entry(2)], final=False) == SCREEN_ITEMS * ITEM_S


def test_the_time_on_servers_of_its_own_is_counted(quality_of):
    quality = quality_of()
    quality.bench = replace(quality.bench, clock=iter(range(0, 100, 5)).__next__)
    quality.judge(entry(1))
    assert quality.spent_s == 5.0
    quality.judge(entry(1))
    assert quality.spent_s == 5.0, "it was judged"


# --- the user's own questions -------------------------------------------------------------------


def test_own_questions_are_asked_as_well(quality_of, questioned, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "two and two?", "check": {"contains": "two"}}\n' * 3)
    quality = quality_of(rules=QualityRules(data=str(file)))
    quality.judge(entry(1))
    keys = [key for one in questioned.asked for key in one.keys if key.startswith("line-")]
    assert keys == ["line-1", "line-2", "line-3"] * 3
    assert read_limits(["yours >= -1pt"], Size.STANDARD, workload(), data=str(file))


def test_other_questions_are_other_rules_and_where_they_lie_does_not_matter(tmp_path):
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file, prompt in zip(files, ("one", "one", "two"), strict=True):
        file.write_text(f'{{"prompt": "{prompt}"}}\n')
    one, same, other = (QualityRules(data=str(file)).settings() for file in files)
    assert one == same != other
    assert set(QualityRules().settings()) == {"limits", "size"}


# --- what finalists are asked -------------------------------------------------------------------


class Growing(Words):
    """Words that never end."""

    def items(self, plan):
        numbers = range(plan.per_category or ITEMS[plan.size])
        return tuple(Item(f"{self.name}-{n}", "one", prompt=f"word {n}") for n in numbers)


@pytest.fixture
def finals_of(monkeypatch, quality_of, questioned):
    """A finalist's items, where the second pass of the stock defaults changes the first answers.

    `ours` are changed in the candidate's screen, one for the better for each for the worse.
    """

    def ask(stock, ours=0, name="s", limits=()):
        def say(arguments, item):
            number = int(item.prompt.removeprefix("word "))
            is_right = number >= ours or number % 2 == bool(arguments)
            is_again = not arguments and questioned.asked[-1].seed == 1
            if is_again and number < stock:
                is_right = not is_right
            return item.prompt if is_right else "no"

        questioned.say = say
        monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Growing(),))
        quality = quality_of(name=name, rules=QualityRules(limits=limits))
        quality.judge(entry(1))
        if quality.objection(entry(1).trial) is None:
            quality.judge(entry(1), final=True)
        asked = sum(len(one.keys) for one in questioned.asked if one.arguments)
        return asked - SCREEN_ITEMS

    return ask


SIX_POINTS = (Limit("words", RIGHT, 0.06), Limit(ANY, BROKEN_OUTPUT, 0.1))


def test_finalists_are_asked_what_is_typical_where_nothing_changes(finals_of):
    assert STANDARD_ITEMS <= finals_of(0) < 0.9 * MOST_PER_CATEGORY


def test_finalists_are_asked_no_less_than_their_size(finals_of):
    assert finals_of(0, limits=SIX_POINTS) == STANDARD_ITEMS


def test_finalists_are_asked_more_where_their_screen_changed_more(finals_of):
    assert finals_of(0, 2, limits=SIX_POINTS) > 1.3 * STANDARD_ITEMS


def test_finalists_are_asked_more_where_the_stock_defaults_change_by_themselves(finals_of):
    assert finals_of(10, 0, limits=SIX_POINTS) > 1.1 * STANDARD_ITEMS


def test_a_finalist_that_would_need_more_than_can_be_asked_is_not_asked(finals_of, quality_of):
    assert finals_of(0, 8) == 0
    reason = quality_of().objection(entry(1).trial)
    assert reason.startswith("it is not asked as a finalist, as it would hardly prove the limits: ")
    assert "its screen showed 40% of 20 answers changed" in reason
    assert f"and {MOST_PER_CATEGORY} can be asked" in reason
    assert re.search(r"a wider limit \('words.right >= -[0-9]+pt' could be proved\)", reason)


def test_the_stock_defaults_are_asked_as_much_as_the_finalist_that_needs_most(
    finals_of, quality_of, questioned
):
    most = finals_of(0, 2, limits=SIX_POINTS)
    quality = quality_of(name="s", rules=QualityRules(limits=SIX_POINTS))
    questioned.say = lambda arguments, item: item.prompt
    quality.judge(entry(2))
    before = len(questioned.asked)
    quality.begin_finals([entry(1), entry(2)], [], 0.0)
    quality.judge(entry(2), final=True)
    assert [bool(one.arguments) for one in questioned.asked[before:]] == [True]
    assert STANDARD_ITEMS < len(questioned.asked[-1].keys) < most
    assert quality.unproved(entry(2).trial) is None, "of the larger number, its own are compared"


def test_the_stock_defaults_are_asked_at_two_servers_what_finalists_are_asked(
    quality_of, questioned
):
    quality = quality_of((1, "screen", "unclear"))
    quality.judge(entry(1), final=True)
    assert questioned.launched == [{}, {"kv-cache-dtype": 1}, {}]
    assert [(one.seed, one.concurrency) for one in questioned.asked] == [
        (0, CONCURRENCY),
        (0, CONCURRENCY),
        (1, AGAIN_CONCURRENCY),
    ], "the second time comes last, since a finalist that lost needs none"


def test_what_cannot_be_proved_is_said_before_it_is_asked(quality_of):
    rules = QualityRules(limits=(Limit("words", RIGHT, 0.001),))
    quality = quality_of(rules=rules)
    for _ in range(2):
        quality.expected_s([], newcomers=1)
    said = quality.bench.reporter.notes
    (note,) = [one for one in said if one.startswith("'words.right >= -0.1pt' would take ")]
    assert note.endswith("and 150 are asked: it cannot be proved unless answers get better")


def test_what_asking_the_finalists_takes_is_said_before_they_are_asked(quality_of):
    quality = quality_of((1, "screen", "unclear"))
    quality.begin_finals([entry(1)], [], 0.0)
    # Ten seconds for a screen; three times what a finalist is asked.
    minutes = math.ceil(3 * STANDARD_ITEMS * 10 / SCREEN_ITEMS / 60)
    said = [note for note in quality.bench.reporter.notes if "asking the finalists" in note]
    assert [note.endswith(f"will take about {minutes} min") for note in said] == [True]
    quality.begin_finals([entry(2, Harm.LOSSLESS)], [], 0.0)
    assert len([note for note in quality.bench.reporter.notes if "asking the" in note]) == 1


# --- reports from before ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reports", "size", "objects", "unproved"),
    [
        ([], Size.STANDARD, "was not asked", "was not asked"),
        ([(1, "screen", "fail")], Size.STANDARD, "worse than allowed", "was not asked"),
        ([(1, "screen", "unclear")], Size.STANDARD, None, "standard size"),
        ([(1, "screen", "pass")], Size.STANDARD, None, "standard size"),
        ([(1, "screen", "unclear"), (1, "standard", "pass")], Size.STANDARD, None, None),
        ([(1, "screen", "fail"), (1, "standard", "pass")], Size.STANDARD, "screen size", None),
        ([(1, "screen", "pass"), (1, "standard", "fail")], Size.STANDARD, "standard size", None),
        ([(1, "standard", "unclear")], Size.STANDARD, "full asks more", None),
        ([(1, "screen", "unclear")], Size.SCREEN, "standard asks more", None),
        ([(1, "screen", "pass")], Size.SCREEN, None, None),
    ],
)
def test_reports_of_an_earlier_search_count(reports, size, objects, unproved, quality_of):
    quality = quality_of(*reports, rules=QualityRules(size=size))
    trial = entry(1).trial
    for said, wanted in ((quality.objection(trial), objects), (quality.unproved(trial), unproved)):
        assert said is None if wanted is None else wanted in said


@pytest.mark.parametrize("given", [{"unanswered": 1}, {"remeasure": True}])
def test_a_report_with_items_unanswered_or_that_is_not_wanted_is_made_again(
    given, quality_of, questioned
):
    quality = quality_of((1, "screen", "fail"), **given)
    assert "was not asked" in quality.objection(entry(1).trial)
    quality.judge(entry(1))
    assert len(questioned.asked) == 3
    assert quality.objection(entry(1).trial) is None


def test_what_cannot_change_answers_needs_no_report(quality_of):
    quality = quality_of()
    assert quality.objection(entry(1, Harm.LOSSLESS).trial) is None
    assert quality.unproved(entry(1, Harm.LOSSLESS).trial) is None
    assert quality.verdict(1) is None


# --- what scores do not show ----------------------------------------------------------------------


def sparse(number):
    """The entry of a trial that reads a part of what it holds, which no score of a prompt shows."""
    found = entry(number, Harm.LOSSY)
    (choice,) = found.trial.stack.choices
    arguments = {"additional-config.kvtune.quest.budget_tokens": 256}
    stack = PolicyStack(choices=(choice.model_copy(update={"arguments": arguments}),))
    return replace(found, trial=found.trial.model_copy(update={"stack": stack}))


@pytest.fixture
def scoring(monkeypatch):
    """As if the suite that is asked had given texts scored."""
    monkeypatch.setattr(Words, "scores", True)


def test_a_limit_on_scores_refuses_what_they_cannot_show_without_asking(
    quality_of, questioned, scoring
):
    quality = quality_of(rules=QualityRules(limits=(Limit("words", RIGHT, 0.05),)))
    assert quality.scores_limit == "words.right >= -5pt"
    quality.judge(sparse(1))
    assert quality.expected_s([sparse(1)]) == 0.0
    assert questioned.asked == []
    said = quality.objection(sparse(1).trial)
    assert said.startswith("'words.right >= -5pt' cannot be proved of it: Quest acts on answers")
    assert "'needle >= -5pt'" in said
    quality.judge(entry(2))
    assert quality.objection(entry(2).trial) is None, "what scores show is asked and judged"


def test_without_a_limit_on_scores_the_rest_of_the_answers_is_judged(
    quality_of, questioned, scoring
):
    quality = quality_of(rules=QualityRules())
    assert quality.scores_limit == ""
    quality.judge(sparse(1))
    report = quality.report(1)
    assert report.figures == ()
    assert "Quest acts on answers alone" in report.skipped["words"]
