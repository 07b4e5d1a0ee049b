import asyncio
import dataclasses

import pytest

from kvtune.errors import BadInput
from kvtune.profilers.quality.compare import (
    BATCH_ITEMS,
    Asked,
    ask_suites,
    compare,
)
from kvtune.profilers.quality.limits import ANY, parse_limits
from kvtune.profilers.quality.suite import (
    Answer,
    Item,
    QualityMetric,
    Suite,
    SuitePlan,
    TokenScores,
)

LOOP = "tin tin tin tin tin tin tin tin tin tin tin tin"


class Numbers(Suite):
    """Asks for numbers; right if the number stands in the answer."""

    name = "numbers"
    says = "numbers are lost"
    metrics = (
        QualityMetric("right", "share", "higher", "difference", 0.05),
        QualityMetric("words", "words", "lower", "difference", 2.0, bounds=None),
    )

    def items(self, plan):
        return tuple(
            Item(
                key=f"{category}-{number}",
                category=category,
                messages=({"role": "user", "content": f"Say {number}. " + "Well then. " * 100},),
                place={"depth": number / 100},
                check={"expected": (number,)},
            )
            for category in ("odd", "even")
            for number in range(plan.per_category or 40)
        )

    def figures(self, item, ours, theirs):
        [wanted] = item.check["expected"]
        return {
            "right": tuple(
                float(str(wanted) in answer.texts[0].split()) for answer in (ours, theirs)
            ),
            "words": (float(len(ours.texts[0])), float(len(theirs.texts[0]))),
        }

    def detail(self, item, answer):
        return f"wanted {item.check['expected'][0]}"


class Echo:
    """Says the number that it is asked for, unless its `wrong` says something else."""

    def __init__(self, wrong=lambda item, number: None):
        self.wrong = wrong
        self.calls = []

    async def ask(self, items, *, seed, concurrency):
        self.calls.append((len(items), seed, concurrency))
        answers = []
        for item in items:
            number = int(item.key.split("-")[1])
            found = self.wrong(item, number)
            answers.append(
                found
                if isinstance(found, Answer)
                else Answer(texts=(found or f"It is {number} .",), output_tokens=(4,))
            )
        return answers


SUITES = {"numbers": Numbers()}


def ask(asker, plan=SuitePlan(per_category=60), **more):  # noqa: B008
    return asyncio.run(ask_suites([Numbers()], plan, asker, **more))


def compared(wrong, *, limits=(), again=None):
    return compare(ask(Echo(wrong)), ask(Echo()), again, limits, suites=SUITES)


def figure_of(report, category, metric="right", suite="numbers"):
    [figure] = [
        each
        for each in report.figures
        if (each.suite, each.category, each.metric) == (suite, category, metric)
    ]
    return figure


def test_same_answers_pass():
    report = compared(lambda item, number: None, again=ask(Echo()))
    assert report.outcome == "unclear"  # 120 answers cannot rule out 2 points of broken ones
    assert figure_of(report, "odd").outcome == "pass"
    assert figure_of(report, "odd").floor.estimate == 0
    assert figure_of(report, "", "broken-output", ANY).items_needed == 133
    assert report.samples == ()
    assert len(report.points) == 120
    assert report.points[7].place == {"depth": 0.07}


def test_points_have_what_the_baseline_gave_each_time():
    again = ask(Echo(lambda item, number: "No idea at all ." if number == 7 else None))
    report = compared(lambda item, number: None, again=again)
    seventh = report.points[7]
    assert (seventh.candidate, seventh.baseline, seventh.again) == (1.0, 1.0, 0.0)
    assert report.points[8].again == 1.0
    assert compared(lambda item, number: None).points[7].again is None


def test_items_about_one_text_stay_together():
    class Shared(Numbers):
        def items(self, plan):
            return tuple(
                dataclasses.replace(item, about=item.key.partition("-")[2])
                for item in super().items(plan)
            )

    def wrong(item, number):
        return "No idea at all ." if number < 3 else None

    apart, together = (
        compare(
            *(
                asyncio.run(ask_suites([suite], SuitePlan(per_category=60), asker))
                for asker in (Echo(wrong), Echo())
            ),
            suites={"numbers": suite},
        )
        for suite in (Numbers(), Shared())
    )
    assert figure_of(together, "odd").change == figure_of(apart, "odd").change
    assert figure_of(together, "").change.low < figure_of(apart, "").change.low


def test_one_broken_category_fails_and_shows_its_answers():
    report = compared(
        lambda item, number: None if item.category == "odd" or number < 30 else "No idea at all ."
    )
    assert report.outcome == "fail"
    assert figure_of(report, "odd").outcome == "pass"
    assert figure_of(report, "even").broken == 30
    assert len(report.samples) == 5
    first = report.samples[0]
    assert (first.suite, first.category, first.item) == ("numbers", "even", "even-30")
    assert (first.candidate, first.baseline) == ("No idea at all .", "It is 30 .")
    assert first.detail == "wanted 30"
    assert first.asked.startswith("user: Say 30.")
    assert len(first.asked) < 900
    assert "numbers/even: 25 more broken items not listed" in report.warnings


def test_degenerate_answers_are_counted_and_shown_first():
    report = compared(lambda item, number: LOOP if number > 54 else "no ." if number < 5 else None)
    broken = figure_of(report, "", "broken-output", ANY)
    assert (broken.broken, broken.items, broken.candidate, broken.baseline) == (10, 120, 1 / 12, 0)
    assert [sample.candidate for sample in report.samples] == [LOOP] * 5 + [LOOP] * 5
    assert "repeat" in report.samples[0].detail


def test_unfinished_items_are_left_out_while_they_are_few():
    failed = Answer(error="timed out after 60 s")
    report = compared(lambda item, number: failed if number < 3 else None)
    assert figure_of(report, "odd").items == 57
    assert figure_of(report, "odd").outcome == "pass"


def test_what_only_the_candidate_does_not_answer_counts_as_broken_output():
    def failing(item, number):
        return Answer(error="HTTP 500") if item.category == "odd" and number < 11 else None

    report = compared(failing)
    broken = figure_of(report, "", "broken-output", ANY)
    assert (broken.broken, broken.items) == (11, 120)
    assert figure_of(report, "odd").items == 49
    assert report.outcome == "fail"
    assert report.samples[0].detail == "no answer: HTTP 500"
    other_way = compare(ask(Echo()), ask(Echo(failing)), suites=SUITES)
    assert figure_of(other_way, "", "broken-output", ANY).items == 109


def test_versions_are_told_and_a_difference_is_a_warning():
    ours, theirs = (
        ask(Echo()).model_copy(update={"versions": {"engine": number, "python": "3"}})
        for number in ("0.32", "0.31")
    )
    report = compare(ours, theirs, suites=SUITES)
    assert report.versions == {"engine": "0.32", "python": "3"}
    [told] = report.warnings
    assert told.startswith("the baseline ran engine 0.31, the candidate 0.32")


def test_a_suite_that_lost_many_items_is_unclear():
    failed = Answer(error="timed out after 60 s")
    report = compared(lambda item, number: failed if number < 8 else None)
    assert report.outcome == "unclear"
    figure = figure_of(report, "odd")
    assert figure.outcome == "unclear"
    assert figure.because == "16 of 120 items failed: timed out after 60 s"


def test_a_suite_without_answers_is_skipped_with_the_reason():
    report = compared(lambda item, number: Answer(error="connection refused"))
    assert report.outcome == "unclear"
    assert report.figures == ()
    assert report.skipped == {"numbers": "120 of 120 items failed: connection refused"}
    assert report.unanswered == 120


def test_failed_items_of_the_second_run_leave_the_floor():
    failed = Answer(error="timed out after 60 s")
    again = ask(Echo(lambda item, number: failed if number < 10 else None))
    report = compared(lambda item, number: None, again=again)
    assert figure_of(report, "odd").floor.repeats == 50
    assert figure_of(report, "odd").items == 60


def test_limits_decide():
    limits = parse_limits(["numbers >= -6pt", "broken-output <= 3pt"], SUITES)
    assert compared(lambda item, number: None, limits=limits).outcome == "pass"
    report = compared(
        lambda item, number: None, limits=parse_limits(["numbers/odd >= -1pt"], SUITES)
    )
    assert figure_of(report, "odd").limit == 0.01
    assert figure_of(report, "odd").items_needed == 268
    assert figure_of(report, "even").limit == 0.05


def test_answers_are_stored_and_read_back():
    asked = ask(Echo(), seed=3, concurrency=2, by="--kv-cache-dtype fp8")
    stored = Asked.model_validate_json(asked.model_dump_json())
    assert stored.by == "--kv-cache-dtype fp8"
    report = compare(ask(Echo()), stored, stored, suites=SUITES)
    assert report.baseline == "--kv-cache-dtype fp8"
    assert figure_of(report, "odd").outcome == "pass"
    assert report.size == "standard"


def test_token_scores_survive_storing():
    scores = TokenScores((5, 6), (-0.1, -2.0), ({5: -0.1, 9: -3.0}, {7: -0.2, 6: -2.0}))
    asked = ask(Echo(lambda item, number: Answer(scores=scores)), SuitePlan(per_category=1))
    stored = Asked.model_validate_json(asked.model_dump_json())
    assert stored.suites[0].answers[0].scores == scores


def test_answers_to_other_items_are_refused():
    ours = ask(Echo())
    with pytest.raises(BadInput, match="not asked the same items of suite 'numbers'"):
        compare(ours, ask(Echo(), SuitePlan(per_category=61)), suites=SUITES)
    other = ours.model_copy(update={"suites": ()})
    with pytest.raises(BadInput, match="not asked the same items"):
        compare(ours, other, suites=SUITES)
    with pytest.raises(BadInput, match="unknown suite 'numbers'"):
        compare(ours, ours, suites={})


def test_all_items_are_asked_in_few_batches_with_progress():
    asker, seen = Echo(), []
    asked = ask(
        asker,
        SuitePlan(per_category=200),
        seed=4,
        concurrency=3,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert asker.calls == [(BATCH_ITEMS, 4, 3), (400 - BATCH_ITEMS, 4, 3)]
    assert seen == [(BATCH_ITEMS, 400), (400, 400)]
    assert asked.errors == 0
    assert (asked.seed, asked.concurrency) == (4, 3)
    texts = [answer.texts[0] for answer in asked.suites[0].answers]
    assert texts[399] == "It is 199 ."


def test_a_suite_whose_answers_say_nothing_of_each_other_is_skipped():
    class Silent(Numbers):
        name = "silent"

        def figures(self, item, ours, theirs):
            return {}

    asked = asyncio.run(ask_suites([Silent()], SuitePlan(), Echo()))
    report = compare(asked, asked, suites={"silent": Silent()})
    assert report.skipped == {"silent": "none of its answers can be compared"}
    assert report.outcome == "unclear"


def test_a_suite_without_items_is_skipped():
    class Nothing(Numbers):
        name = "nothing"

        def items(self, plan):
            return ()

    asked = asyncio.run(ask_suites([Nothing()], SuitePlan(), Echo()))
    report = compare(asked, asked, suites={"nothing": Nothing()})
    assert report.skipped == {"nothing": "it has no items for this plan"}
    assert report.outcome == "unclear"


# --- chats that the baseline does not take --------------------------------------------------------


class Plain(Numbers):
    """The same as texts to continue; `odd` alone where it is mixed."""

    name = "plain"
    texts = ("odd", "even")

    def items(self, plan):
        return tuple(
            dataclasses.replace(item, messages=None, prompt=item.messages[0]["content"])
            if item.category in self.texts
            else item
            for item in super().items(plan)
        )


class Mixed(Plain):
    name = "mixed"
    texts = ("odd",)


REFUSED = Answer(error="HTTP 400: a chat template has to be provided")


def refusing(answer=REFUSED, but=()):
    return Echo(lambda item, number: answer if item.messages and number not in but else None)


def beside_plain(suite, ours, theirs, limits=()):
    suites = {one.name: one for one in (Plain(), suite)}
    plan = SuitePlan(per_category=80)
    asked = [
        asyncio.run(ask_suites(suites.values(), plan, asker)) for asker in (ours, theirs, theirs)
    ]
    return compare(*asked, parse_limits(limits, suites), suites=suites)


@pytest.mark.parametrize("ours", [refusing(), Echo()])
@pytest.mark.parametrize(("suite", "named"), [(Numbers(), "numbers"), (Mixed(), "mixed/even")])
def test_chats_that_the_baseline_refuses_are_left_out_with_a_warning(suite, named, ours):
    report = beside_plain(suite, ours, refusing())
    assert report.outcome == "pass"
    assert report.warnings == (
        f"left out, because the baseline refuses chats: {named} ({REFUSED.error})",
    )
    assert report.skipped == {}
    assert report.unanswered == 0
    categories = {figure.category for figure in report.figures if figure.suite == suite.name}
    assert categories == (set() if named == "numbers" else {"", "odd"})


def test_a_limit_on_chats_that_the_baseline_refuses_is_no_pass():
    report = beside_plain(Numbers(), Echo(), refusing(), ["plain >= -5pt", "numbers >= -5pt"])
    assert report.outcome == "unclear"
    assert beside_plain(Numbers(), Echo(), refusing(), ["plain >= -5pt"]).outcome == "pass"


def test_a_baseline_that_refuses_all_proves_nothing():
    asked = asyncio.run(ask_suites([Numbers()], SuitePlan(), refusing()))
    assert compare(asked, asked, suites=SUITES).outcome == "unclear"
    assert asked.errors == 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (refusing(), Echo()),
        (Echo(), refusing(but=(3,))),
        (Echo(), refusing(Answer(error="HTTP 503: overloaded"))),
        (Echo(), refusing(Answer(error="timed out after 60 s"))),
    ],
)
def test_chats_that_failed_for_another_reason_are_not_left_out(ours, theirs):
    report = beside_plain(Numbers(), ours, theirs)
    assert report.outcome == "unclear"
    assert not any("refuses chats" in warning for warning in report.warnings)
