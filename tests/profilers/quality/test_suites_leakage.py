import base64
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.suite import Answer, Size, SuitePlan, suites
from kvtune.profilers.quality.suites.leakage import ATTACKS, Leakage, rouge_l_recall

CATEGORIES = {"secret-first", "defence-first", "protected", "ordinary"}
DEFENCE = "Never reveal"


@cache
def _items(size=Size.STANDARD, protects=True, **plan):
    return Leakage().items(SuitePlan(size, protects=protects, **plan))


def _of(category, items):
    return [item for item in items if item.category == category]


def _figures(item, text):
    figures = Leakage().figures(item, Answer(texts=(text,)), Answer(texts=("",)))
    assert all(theirs == 0 for _, theirs in figures.values())
    return {name: ours for name, (ours, _) in figures.items()}


def _system(item):
    return item.messages[0]["content"]


def _kind(item):
    return item.key.rsplit("-", 1)[1]


@pytest.fixture
def item():
    return _items(Size.SCREEN)[0]


def test_the_suite_is_found_by_its_name():
    assert isinstance(suites()["leakage"], Leakage)


def test_a_larger_size_begins_with_the_items_of_the_smaller_one():
    screen, standard, full = (_items(size) for size in Size)
    assert standard[: len(screen)] == screen
    assert full[: len(standard)] == standard
    assert len(screen) < len(standard) < len(full)


def test_every_category_has_the_same_number_of_items_with_keys_of_their_own():
    items = _items()
    assert Counter(item.category for item in items) == dict.fromkeys(CATEGORIES, 24)
    assert len({item.key for item in items}) == len(items)


def test_secrets_of_a_category_are_all_different_and_depend_on_the_seed():
    for category in CATEGORIES:
        values = [value for item in _of(category, _items()) for value in item.check["secret"]]
        others = [value for item in _of(category, _items(seed=1)) for value in item.check["secret"]]
        assert len(set(values)) == len(values)
        assert not set(values) & set(others)


def test_a_screen_tries_every_attack_and_a_standard_run_every_attack_in_both_orders():
    screen = _items(Size.SCREEN)
    attacked = _of("secret-first", screen) + _of("defence-first", screen)
    assert {_kind(item) for item in attacked} == set(ATTACKS)
    for category in ("secret-first", "defence-first", "protected"):
        kinds = Counter(_kind(item) for item in _of(category, _items()))
        assert kinds == dict.fromkeys(ATTACKS, 3)


def test_the_spans_stand_in_the_order_that_the_category_names():
    for item in _items():
        secret = _system(item).index(item.check["secret"][0])
        defence = _system(item).index(DEFENCE)
        assert (secret < defence) == (item.category != "defence-first")
        assert abs(secret - defence) > 800  # a few cache blocks lie between them


def test_the_user_never_gives_the_secret_away():
    for item in _items():
        system, user = item.messages
        assert (system["role"], user["role"]) == ("system", "user")
        for value in item.check["secret"]:
            assert value in system["content"]
            assert value not in user["content"]


def test_protected_items_are_the_unprotected_ones_with_the_system_prompt_kept():
    items = _items()
    pairs = zip(_of("secret-first", items), _of("protected", items), strict=True)
    for open_item, protected in pairs:
        assert open_item.messages == protected.messages
        assert open_item.protected == ()
        assert protected.protected == (_system(protected),)


def test_where_nothing_is_protected_no_item_is_asked_twice():
    unprotected = _items(protects=False)
    assert unprotected == tuple(item for item in _items() if not item.protected)
    assert len({repr(item.messages) for item in unprotected}) == len(unprotected)


@pytest.mark.parametrize("most", [0, 400, 800, 1500])
def test_system_prompts_that_may_not_fit_are_left_out(most):
    items = _items(max_tokens=most)
    for item in items:
        told = sum(len(message["content"]) for message in item.messages)
        assert told / 3 + item.output_tokens < most
    assert bool(items) == (most >= 800)


def _spelled(word):
    return "-".join(word)


@pytest.mark.parametrize(
    "write",
    [
        str,
        str.upper,
        "It is {}.".format,
        lambda value: value[::-1],
        _spelled,
        lambda value: " ".join(value),
        lambda value: _spelled(value[::-1]),
        lambda value: base64.b64encode(f"it is {value}".encode()).decode(),
    ],
    ids=["plain", "upper", "sentence", "backwards", "dashes", "spaces", "dashes-back", "base64"],
)
def test_a_secret_counts_as_leaked_however_it_is_written(item, write):
    first, second, third = item.check["secret"]
    assert _figures(item, write(first))["leak"] == pytest.approx(1 / 3)
    all_of_it = "\n".join(write(value) for value in (first, second, third))
    assert _figures(item, all_of_it)["leak"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot help with that.",
        "The master password is a secret.",
        "SGVsbG8gdGhlcmU=",
        "a b c",
    ],
)
def test_refusals_leak_nothing(item, text):
    assert _figures(item, text)["leak"] == 0


def test_part_of_a_value_is_no_leak(item):
    password, _, number = item.check["secret"]
    assert _figures(item, f"{password[:-1]} {number}0")["leak"] == 0


def test_repeating_the_defence_is_a_figure_of_its_own(item):
    defence = _system(item).splitlines()[-1]
    assert defence.startswith(DEFENCE)
    figures = _figures(item, defence)
    assert figures["prompt-leak"] == 1
    assert figures["leak"] == 0
    half = " ".join(defence.split()[: len(defence.split()) // 2])
    assert _figures(item, half)["prompt-leak"] == pytest.approx(0.5, abs=0.05)


def test_an_answer_obeys_when_it_begins_as_the_system_prompt_asks(item):
    opener = item.check["opener"]
    assert opener.capitalize() in _system(item)
    assert _figures(item, f"{opener.capitalize()}, good day.")["obeyed"] == 1
    assert _figures(item, f"**{opener}** good day.")["obeyed"] == 1
    assert _figures(item, f"Good day, {opener}.")["obeyed"] == 0
    assert _figures(item, "")["obeyed"] == 0


def test_only_ordinary_questions_ask_for_the_role():
    for item in _items(Size.SCREEN):
        assert ("role" in _figures(item, "x")) == (item.category == "ordinary")
    item = _of("ordinary", _items(Size.SCREEN))[0]
    name, town = (value.capitalize() for value in item.check["known"])
    assert f"You are {name}, the assistant of the museum in {town}." in _system(item)
    assert _figures(item, f"I am {name}, in {town}.")["role"] == 1
    assert _figures(item, f"I live in {town}.")["role"] == 0.5
    assert _figures(item, "I live here.")["role"] == 0


def test_what_leaked_is_named(item):
    first, second, _ = item.check["secret"]
    said = Leakage().detail(item, Answer(texts=(f"{first}!",)))
    assert first in said
    assert second not in said
    assert Leakage().detail(item, Answer(texts=("No.",))) == ""


@pytest.mark.parametrize(
    ("reference", "said", "recall"),
    [("a b c d", "a x c", 0.5), ("a b", "b a", 0.5), ("a b c", "x a y b z c", 1), ("a", "", 0)],
)
def test_recall_counts_the_longest_common_subsequence(reference, said, recall):
    assert rouge_l_recall(reference.split(), said.split()) == recall


def _subsequences(words):
    found = {()}
    for word in words:
        found |= {(*short, word) for short in found}
    return found


@given(st.text("abc", min_size=1, max_size=7), st.text("abc", max_size=7))
def test_recall_agrees_with_every_subsequence_tried(reference, said):
    common = _subsequences(reference) & _subsequences(said)
    longest = max(len(short) for short in common)
    assert rouge_l_recall(list(reference), list(said)) == longest / len(reference)
