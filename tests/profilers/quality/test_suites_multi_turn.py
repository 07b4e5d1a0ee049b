from collections import Counter
from functools import cache

import pytest

from kvtune.profilers.quality.suite import Answer, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.multi_turn import MultiTurn

CATEGORIES = {"after-2", "after-4", "after-8", "second-question"}


@cache
def _items(size=Size.STANDARD, **plan):
    return MultiTurn().items(SuitePlan(size, **plan))


def _of(category, items):
    return [item for item in items if item.category == category]


def _figures(item, *texts):
    figures = MultiTurn().figures(item, Answer(texts=texts), Answer(texts=("", "", "")))
    assert all(theirs == 0 for _, theirs in figures.values())
    return {name: ours for name, (ours, _) in figures.items()}


def _told(item):
    return "\n".join(message["content"] for message in item.messages)


def test_the_suite_is_found_by_its_name():
    assert isinstance(suites()["multi-turn"], MultiTurn)


def test_a_larger_size_begins_with_the_items_of_the_smaller_one():
    screen, standard, full = (_items(size) for size in Size)
    assert standard[: len(screen)] == screen
    assert full[: len(standard)] == standard
    assert len(screen) < len(standard) < len(full)


def test_every_category_has_the_same_number_of_items_with_keys_of_their_own():
    items = _items()
    assert Counter(item.category for item in items) == dict.fromkeys(CATEGORIES, 24)
    assert len({item.key for item in items}) == len(items)


def test_another_seed_tells_other_things():
    assert {item.key for item in _items()} == {item.key for item in _items(seed=1)}
    assert not {_told(item) for item in _items()} & {_told(item) for item in _items(seed=1)}


def test_items_of_a_category_ask_for_facts_of_their_own():
    for category in CATEGORIES:
        values = [value for item in _of(category, _items()) for value in item.check["expected"]]
        assert len(set(values)) == len(values)


def test_roles_take_turns_and_the_user_has_the_last_word():
    for item in _items(Size.SCREEN):
        roles = [message["role"] for message in item.messages]
        assert roles[::2] == ["user"] * len(roles[::2])
        assert roles[1::2] == ["assistant"] * len(roles[1::2])
        assert roles[-1] == "user"


@pytest.mark.parametrize("turns", [2, 4, 8])
def test_the_turns_of_a_category_lie_between_the_fact_and_its_question(turns):
    for item in _of(f"after-{turns}", _items()):
        [value] = item.check["expected"]
        assert value in item.messages[0]["content"]
        assert value not in "".join(message["content"] for message in item.messages[1:])
        assert len(item.messages) == 2 * turns + 3
        assert item.place["turns"] == turns


def test_longer_conversations_continue_shorter_ones():
    by_turns = [_of(f"after-{turns}", _items(Size.SCREEN)) for turns in (2, 4, 8)]
    for short, middle, long in zip(*by_turns, strict=True):
        assert middle.messages[: len(short.messages) - 1] == short.messages[:-1]
        assert long.messages[: len(middle.messages) - 1] == middle.messages[:-1]


def test_later_questions_are_about_what_only_the_first_message_tells():
    for item in _of("second-question", _items()):
        [message] = item.messages
        assert len(item.follow_ups) == 2
        assert len(item.check["expected"]) == 3
        for value in item.check["expected"]:
            assert message["content"].count(value) == 1
            assert not any(value in question for question in item.follow_ups)
        assert not any(question in message["content"] for question in item.follow_ups)


def test_every_fact_comes_first_in_some_item():
    firsts = {
        item.messages[0]["content"].rsplit("\n\n", 1)[1].split()[3]
        for item in _of("second-question", _items(Size.SCREEN))
    }
    assert len(firsts) == 3


def test_prompts_span_several_blocks():
    for item in _items(Size.SCREEN):
        assert len(_told(item)) / 4.7 > 250


@pytest.mark.parametrize("most", [0, 400, 800, 1500, 5000])
def test_conversations_that_may_not_fit_are_left_out(most):
    for item in _items(max_tokens=most):
        answers = (1 + len(item.follow_ups)) * item.output_tokens
        assert (len(_told(item)) + len("".join(item.follow_ups))) / 3 + answers < most
    assert bool(_items(max_tokens=most)) == (most >= 800)


def test_an_answer_that_names_the_fact_counts():
    item = _of("after-4", _items(Size.SCREEN))[0]
    [value] = item.check["expected"]
    assert _figures(item, f"It is {value}.") == {"recall": 1}
    assert _figures(item, "It is 12.") == {"recall": 0}
    assert _figures(item) == {"recall": 0}


def test_later_questions_are_a_figure_apart_from_the_first():
    item = _of("second-question", _items(Size.SCREEN))[0]
    first, second, third = item.check["expected"]
    assert _figures(item, first, "no", "no") == {"recall": 0, "first-recall": 1}
    assert _figures(item, "no", second, "no") == {"recall": 0.5, "first-recall": 0}
    assert _figures(item, "no", second, third) == {"recall": 1, "first-recall": 0}


def test_a_fact_counts_only_where_it_was_asked_for():
    item = _of("second-question", _items(Size.SCREEN))[0]
    first, second, third = item.check["expected"]
    assert _figures(item, second, third, first) == {"recall": 0, "first-recall": 0}


def test_what_was_missed_is_named():
    item = _of("second-question", _items(Size.SCREEN))[0]
    first, second, third = item.check["expected"]
    said = MultiTurn().detail(item, Answer(texts=(first, "no", third)))
    assert second in said
    assert first not in said
    assert MultiTurn().detail(item, Answer(texts=(first, second, third))) == ""
