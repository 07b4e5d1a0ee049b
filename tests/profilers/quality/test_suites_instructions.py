import itertools
import json
import random
import re

import pytest

from kvtune.profilers.quality.instruction_checks import CHECKS, check
from kvtune.profilers.quality.instruction_rules import COMBINED, IN_SYSTEM, MAKERS, keywords, order
from kvtune.profilers.quality.passage_words import FRAMES
from kvtune.profilers.quality.passages import passage
from kvtune.profilers.quality.suite import Answer, Item, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.instructions import Instructions

SUITE = Instructions()
PLAN = SuitePlan(per_category=25)
ITEMS = SUITE.items(PLAN)
PAGES = [passage(random.Random(seed)) for seed in range(25)]
SINGLE = [make for makers in MAKERS.values() for make in makers]


def said(text: str) -> Answer:
    return Answer(texts=(text,), output_tokens=(9,), finish_reasons=("stop",))


def item_of(*rules: dict[str, object]) -> Item:
    return Item(key="k", category="c", prompt="p", check={"rules": list(rules)})


NO_COMMAS = {"kind": "no-commas", "parameters": {}, "says": "Do not use any commas."}
SHORT = {
    "kind": "words",
    "parameters": {"relation": "at most", "count": 5},
    "says": "Use at most 5 words.",
}


def test_it_is_found_by_name():
    assert isinstance(suites()["instructions"], Instructions)


def test_the_same_plan_gives_the_same_items_and_another_seed_others():
    assert SUITE.items(SuitePlan(seed=3)) == SUITE.items(SuitePlan(seed=3))
    ours, theirs = SUITE.items(SuitePlan(seed=3)), SUITE.items(SuitePlan(seed=4))
    assert all(mine.messages != other.messages for mine, other in zip(ours, theirs, strict=True))


def test_a_larger_size_extends_a_smaller_one():
    sizes = [SUITE.items(SuitePlan(size=size)) for size in Size]
    assert all(large[: len(small)] == small for small, large in itertools.pairwise(sizes))
    assert len(sizes[0]) < len(sizes[1]) < len(sizes[2])


def test_every_type_has_a_category_and_keys_are_unique():
    items = ITEMS
    assert {item.category for item in items} == {*MAKERS, "combined", "system"}
    assert len({item.key for item in items}) == len(items) == 25 * (len(MAKERS) + 2)


def test_items_of_a_category_are_about_different_texts_and_those_of_a_number_share_one():
    items = [item for item in ITEMS if item.category != "system"]
    texts = {item.key: item.messages[0]["content"].rpartition("\n\n")[0] for item in items}
    for category in MAKERS:
        own = [text for key, text in texts.items() if key.startswith(f"{category}-")]
        assert len(set(own)) == len(own)
    assert texts["length-3"] == texts["json-3"] == texts["combined-3"]


def test_prompts_span_several_blocks():
    for item in ITEMS:
        told = " ".join(message["content"] for message in item.messages)
        assert len(told.split()) > 250  # 300 tokens and more
        assert item.messages[-1]["role"] == "user"


def test_rules_in_the_system_prompt_are_not_repeated_behind_the_text():
    for item in ITEMS:
        system, *others = item.messages
        assert (item.category == "system") == (system["role"] == "system")
        if item.category == "system":
            [rule] = item.check["rules"]
            assert rule["says"] in system["content"]
            assert not any(rule["says"] in message["content"] for message in others)


def test_what_is_checked_is_said_last():
    for item in ITEMS:
        place = 0 if item.category == "system" else -1
        for rule in item.check["rules"]:
            assert rule["kind"] in CHECKS
            assert rule["says"] in item.messages[place]["content"]
            for name, value in rule["parameters"].items():
                if name in ("count", "word") and value not in (1, 2):
                    told = item.messages[-1]["content"]
                    assert re.search(rf"\b{value}\b", f"{rule['says']} {told}")
                for word in value if isinstance(value, list) else []:
                    assert f'"{word}"' in rule["says"]


def test_answers_that_are_shown_follow_their_instruction():
    rules = [make(random.Random(n), PAGES[n]) for n in range(25) for make in SINGLE]
    assert sum(bool(rule.shown) for rule in rules) > 200
    for rule in rules:
        for turn in rule.shown:
            told = f"{turn.task} {turn.says}"
            parameters = dict(rule.parameters)
            if "word" in parameters:
                word, *others = turn.answer.split()
                assert {word, *others} == {word}
                assert f'"{word}" {len(others) + 1} times' in told
                assert (word, len(others) + 1) != (parameters["word"], parameters["count"])
                parameters |= {"word": word, "count": len(others) + 1}
            if "words" in parameters:
                assert turn.says != rule.says
                parameters["words"] = re.findall(r'"(\w+)"', turn.says)
            assert check(rule.kind, parameters, turn.answer)


def test_what_was_shown_is_not_the_answer():
    for number in range(25):
        for make in (keywords, order):
            rule = make(random.Random(number), PAGES[number])
            assert not any(check(rule.kind, rule.parameters, turn.answer) for turn in rule.shown)


def test_words_that_are_asked_for_stand_in_one_sentence_of_the_text():
    for item in ITEMS:
        if item.category in ("keywords", "order"):
            [rule] = item.check["rules"]
            text = item.messages[0]["content"].rpartition("\n\n")[0]
            lines = re.split(r"(?<=[.?!])\s+", text)
            assert any(check("order", rule["parameters"], line) for line in lines)


def test_kinds_of_a_category_take_turns():
    for category, makers in {**MAKERS, "system": IN_SYSTEM}.items():
        own = [item for item in ITEMS if item.category == category]
        kinds = [item.check["rules"][0] for item in own[: len(makers)]]
        assert len({(rule["kind"], rule["says"].partition('"')[0]) for rule in kinds}) == len(
            makers
        )


def test_checks_can_be_stored():
    for item in SUITE.items(SuitePlan(size=Size.SCREEN)):
        assert json.loads(json.dumps(item.check)) == item.check


@pytest.mark.parametrize("max_tokens", [200, 620, 900])
def test_items_fit_what_the_model_takes(max_tokens):
    items = SUITE.items(SuitePlan(per_category=3, max_tokens=max_tokens))
    for item in items:
        characters = sum(len(message["content"]) for message in item.messages)
        assert characters / 4.5 + item.output_tokens < max_tokens
    assert bool(items) == (max_tokens > 200)


def test_instructions_that_are_combined_differ():
    for makers in COMBINED:
        assert len(set(makers)) == len(makers) >= 2


def test_one_of_two_instructions_followed_is_half():
    item = item_of(NO_COMMAS, SHORT)
    figures = SUITE.figures(item, said("It is old and small and far away."), said("It is old."))
    assert figures == {"followed": (0.5, 1.0)}
    assert SUITE.detail(item, said("It is old and small and far away.")) == (
        "not followed: Use at most 5 words."
    )
    assert SUITE.detail(item, said("It is old.")) == ""


@pytest.mark.parametrize("broken", ["", "the the the " * 12, "a\ufffd\ufffd\ufffd b"])
def test_broken_text_follows_nothing_even_if_it_has_no_commas(broken):
    item = item_of(NO_COMMAS)
    assert SUITE.figures(item, said(broken), said("It is old.")) == {"followed": (0.0, 1.0)}
    assert SUITE.detail(item, said(broken))


def test_passages_use_the_words_that_they_say_they_use():
    for seed in range(30):
        page = passage(random.Random(seed))
        assert page.subject in page.text
        assert len(set(page.words)) == len(page.words) >= 8
        assert [word for word in page.words if word not in page.text.lower()] == []


def test_a_shorter_passage_begins_like_the_long_one():
    long, short = passage(random.Random(7)), passage(random.Random(7), 10)
    assert long.text.startswith(short.text)
    assert long.subject == short.subject


def test_frames_fill_all_their_slots():
    for frame in FRAMES:
        assert len(frame.lines) == 30
        assert len(set(frame.lines)) == 30
    for seed in range(60):
        assert not re.search(r"[{}]", passage(random.Random(seed)).text)
