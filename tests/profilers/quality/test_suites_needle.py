from collections import Counter, defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.quality.suite import Answer, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.needle import Needle
from kvtune.profilers.quality.texts import most_tokens, names

CATEGORIES = {
    "single", "multi-key", "multi-value", "variable-tracking", "key-value", "multilingual",
}  # fmt: skip
SHARED = {"single", "multi-key", "multi-value", "variable-tracking"}


@cache
def _items(size=Size.STANDARD, **plan):
    return Needle().items(SuitePlan(size, **plan))


def _figure(item, text):
    [(ours, theirs)] = Needle().figures(item, Answer(texts=(text,)), Answer(texts=("",))).values()
    assert theirs == 0
    return ours


def _least_context_tokens(item):
    """What the item needs with a tokenizer that makes as many tokens as is usual for such texts."""
    characters_per_token = {"key-value": 2.0, "multilingual": 1.9}.get(item.category, 3)
    if "密码" in item.prompt:
        characters_per_token = 0.55
    return len(item.prompt) / characters_per_token + item.output_tokens


def _of(category, items):
    return [item for item in items if item.category == category]


def test_the_suite_is_found_by_its_name():
    assert isinstance(suites()["needle"], Needle)


@pytest.mark.parametrize("plan", [{}, {"max_tokens": 1500}, {"seed": 7}])
def test_a_larger_size_begins_with_the_items_of_the_smaller_one(plan):
    screen, standard, full = (_items(size, **plan) for size in Size)
    assert standard[: len(screen)] == screen
    assert full[: len(standard)] == standard
    assert len(screen) < len(standard) < len(full)


def test_every_category_has_the_same_number_of_items_with_keys_of_their_own():
    items = _items()
    assert set(Counter(item.category for item in items).values()) == {24}
    assert {item.category for item in items} == CATEGORIES
    assert len({item.key for item in items}) == len(items)


@given(st.integers(0, 40))
@settings(max_examples=10, deadline=None)
def test_the_number_of_items_can_be_chosen(count):
    items = _items(Size.SCREEN, per_category=count)
    assert len(items) == count * len(CATEGORIES)


def test_another_seed_asks_other_things():
    first, second = _items(Size.SCREEN), _items(Size.SCREEN, seed=1)
    assert [item.key for item in first] == [item.key for item in second]
    assert not {item.prompt for item in first} & {item.prompt for item in second}


def test_texts_of_a_category_are_independent():
    for category in CATEGORIES:
        items = _of(category, _items())
        assert len({item.prompt for item in items}) == len(items)
        values = [value for item in items for value in item.check["expected"]]
        assert len(set(values)) == len(values)


def test_facts_stand_in_the_text_where_the_map_says():
    for item in _items():
        if item.category in ("multi-value", "variable-tracking"):
            continue
        [value] = item.check["expected"]
        assert item.prompt.count(value) == 1
        at = item.prompt.index(value) / len(item.prompt)
        assert at == pytest.approx(item.place["depth"], abs=0.2)


def test_every_expected_value_is_in_the_text_and_not_in_what_asks_for_it():
    for item in _items():
        told, asked = item.prompt.rsplit("\n\n", 1)
        for value in item.check["expected"]:
            assert names(value, told)
            assert not names(value, asked)


def test_screen_covers_every_depth_and_standard_every_length_at_every_depth():
    places = defaultdict(set)
    for item in _items(Size.SCREEN):
        places[item.category].add(item.place["depth"])
    assert all(depths == {0.1, 0.3, 0.5, 0.7, 0.9} for depths in places.values())
    grid = {tuple(item.place.values()) for item in _of("single", _items())}
    for length in (450, 900, 1600):
        assert {depth for at, depth in grid if at == length} == {0.1, 0.3, 0.5, 0.7, 0.9}


def test_questions_about_one_text_share_its_words_up_to_the_question():
    for number in range(5):
        asked = [
            item
            for item in _items(Size.SCREEN)
            if item.category in SHARED and item.key.split("-")[-2] == str(number)
        ]
        assert len(asked) == len(SHARED)
        assert len({item.prompt.rsplit("\n\n", 1)[0] for item in asked}) == 1


@given(most=st.integers(0, 5000), size=st.sampled_from(Size))
@settings(max_examples=20, deadline=None)
def test_nothing_is_asked_that_may_not_fit_the_model(most, size):
    items = _items(size, max_tokens=most, per_category=8)
    for item in items:
        assert _least_context_tokens(item) <= most
    if most >= 2000:
        assert items


def test_short_contexts_get_short_texts_and_tiny_ones_none():
    assert {item.place["length_tokens"] for item in _items(max_tokens=700)} == {300, 225}
    assert {item.place["length_tokens"] for item in _items(max_tokens=450)} == {150}
    assert _items(max_tokens=100) == ()


def test_english_prompts_are_measured_by_their_characters():
    for item in _of("single", _items()):
        assert len(item.prompt) / 4.7 == pytest.approx(item.place["length_tokens"], rel=0.25)
        assert most_tokens(item.prompt) < 2 * item.place["length_tokens"] + 80


def test_a_right_answer_counts_and_a_wrong_one_does_not():
    for item in _items(Size.SCREEN):
        expected = item.check["expected"]
        assert _figure(item, " " + ", ".join(expected) + ".\nSo it is.") == 1
        assert _figure(item, " 11111, I think.") == 0
        assert _figure(item, "") == 0


def test_a_value_on_a_later_line_is_another_answer():
    item = _of("single", _items(Size.SCREEN))[0]
    [value] = item.check["expected"]
    assert _figure(item, f"\n {value}.") == 1
    assert _figure(item, f" unknown.\nIt is {value}.") == 0


def test_some_of_many_values_are_worth_their_share():
    item = _of("multi-value", _items(Size.SCREEN))[0]
    first, second, third = item.check["expected"]
    assert _figure(item, f" {first} and 99999.") == pytest.approx(1 / 3)
    assert _figure(item, f" {third}, {first}.") == pytest.approx(2 / 3)
    assert _figure(item, f" {second}, {third}, {first}.") == 1


def test_a_chain_may_be_followed_over_two_lines():
    item = _of("variable-tracking", _items(Size.SCREEN))[0]
    key, room = item.check["expected"]
    assert _figure(item, f" {key}.\nThe key opens room {room}.") == 1
    assert _figure(item, f" {key}.\nIt opens.\nA room {room}.") == 0.5


def test_what_was_missed_is_named():
    item = _of("single", _items(Size.SCREEN))[0]
    [value] = item.check["expected"]
    assert value in Needle().detail(item, Answer(texts=(" nothing",)))
    assert Needle().detail(item, Answer(texts=(f" {value}",))) == ""
