"""The plugin's quality beside the reference engine's: how prompts are cut, what agrees."""

import pytest
from plugin_quality import NONE, POLICIES, SUITES, by_pages, rows_of, same_answers, table

from kvtune.policies.method_stack import parse_stack
from kvtune.policies.plugin_config import PluginConfig
from kvtune.profilers.quality.compare import Asked, AskedSuite
from kvtune.profilers.quality.suite import Answer, Size, SuitePlan

ITEMS = 12
PLAN = SuitePlan(size=Size.SCREEN, per_category=ITEMS, max_tokens=1248)


def asked(is_right):
    """Answers that are right where `is_right` says so, by the number of the item."""
    found = []
    for suite in SUITES:
        items = suite.items(PLAN)
        answers = []
        for number, item in enumerate(items):
            turns = 1 + len(item.follow_ups)
            expected = item.check["expected"]
            right = expected if turns > 1 else [" ".join(expected)]
            texts = right if is_right(number) else ["no idea"] * turns
            answers.append(Answer(tuple(texts), (4,) * turns, ("stop",) * turns))
        found.append(AskedSuite(name=suite.name, items=items, answers=tuple(answers)))
    return Asked(suites=tuple(found), plan=PLAN, seed=0, concurrency=1, wall_s=1.0)


def recall(rows, suite):
    (row,) = (row for row in rows if (row["suite"], row["metric"]) == (suite, "recall"))
    return row


def test_the_same_answers_agree_and_are_the_same_to_the_letter():
    half = asked(lambda number: number % 2)
    for suite in ("needle", "multi-turn"):
        row = recall(rows_of(POLICIES[0], SUITES, half, half), suite)
        assert row["vllm"] == row["reference"]
        assert row["change"][0] == 0
        assert row["agrees"] is True
        assert row["same_answers"] == 1


def test_a_policy_that_costs_much_more_on_one_side_does_not_agree():
    rows = rows_of(POLICIES[0], SUITES, asked(lambda number: number % 3 == 0), asked(bool))
    row = recall(rows, "needle")
    assert row["vllm"][0] == pytest.approx(1 / 3)
    assert row["vllm"][1] < 1 / 3 < row["vllm"][2]
    assert row["change"][2] < 0
    assert row["agrees"] is False
    assert "| **no** |" in table(rows)


def test_a_score_that_few_items_change_agrees_but_its_answers_are_not_all_the_same():
    rows = rows_of(POLICIES[0], SUITES, asked(lambda number: number != 5), asked(lambda n: True))
    row = recall(rows, "needle")
    assert row["agrees"] is True
    assert row["same_answers"] == pytest.approx(1 - 1 / row["items"])


def test_a_score_lies_between_nothing_and_all():
    rows = rows_of(POLICIES[0], SUITES, asked(lambda n: n == 0), asked(lambda n: n > 0))
    for row in rows:
        for mean, low, high in (row["vllm"], row["reference"]):
            assert 0 <= low <= mean <= high <= 1


def test_each_turn_counts_among_the_same_answers():
    ours, theirs = (asked(lambda n: True).suites[1] for _ in range(2))
    chats = [item for item in ours.items if item.follow_ups]
    turns = sum(1 + len(item.follow_ups) for item in ours.items)
    answers = tuple(
        Answer((*answer.texts[:-1], "no"), answer.output_tokens, answer.finish_reasons)
        if item.follow_ups
        else answer
        for item, answer in zip(theirs.items, theirs.answers, strict=True)
    )
    theirs = theirs.model_copy(update={"answers": answers})
    assert same_answers(ours, theirs) == pytest.approx(1 - len(chats) / turns)


@pytest.mark.parametrize(
    ("seen_tokens", "lengths"), [(0, [32, 32, 6]), (30, [2, 32, 32, 4]), (64, [32, 32, 6])]
)
def test_prompts_are_cut_where_pages_end(seen_tokens, lengths):
    prompt = list(range(70))
    pieces = list(by_pages(prompt, seen_tokens))
    assert [len(piece) for piece in pieces] == lengths
    assert [token for piece in pieces for token in piece] == prompt


@pytest.mark.parametrize("policy", [NONE, *POLICIES], ids=lambda policy: policy.name)
def test_both_sides_understand_what_they_are_asked(policy):
    assert PluginConfig.model_validate(policy.asked).is_asked is bool(policy.asked)
    assert bool(parse_stack(policy.stack).methods) is bool(policy.asked)
