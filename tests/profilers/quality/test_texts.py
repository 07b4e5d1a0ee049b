from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.quality.texts import (
    VOCABULARIES,
    coined_words,
    filler,
    hex_words,
    most_tokens,
    most_tokens_of,
    most_tokens_of_any,
    names,
    numbers,
    seeded,
    with_facts,
)

languages = st.sampled_from(sorted(VOCABULARIES))
seeds = st.integers(0, 10**6)


def _grams(text, length):
    units = text.split() if " " in text else list(text)
    return {tuple(units[start : start + length]) for start in range(len(units) - length + 1)}


@given(seed=seeds, length=st.integers(0, 900), language=languages)
@settings(max_examples=60, deadline=None)
def test_filler_has_about_the_wanted_length_and_never_more(seed, length, language):
    words = VOCABULARIES[language]
    text = words.joint.join(filler(Random(seed), length, language))
    longest_sentence = 150
    assert len(text) <= length * words.typical_characters
    assert len(text) > length * words.typical_characters - longest_sentence
    assert most_tokens(text, language) <= most_tokens_of(length, language)


@given(st.text())
def test_no_text_has_more_tokens_than_bytes_nor_english_than_a_third(text):
    most = most_tokens_of_any(text)
    assert most <= len(text.encode(errors="replace"))
    plain = text.encode("ascii", "ignore").decode()
    assert most_tokens_of_any(plain) == most_tokens(plain)


def test_a_script_that_no_tokenizer_learned_counts_by_bytes():
    assert most_tokens_of_any("曉鳥 abc") == 6 + 2  # three bytes a character; four characters by 3


@given(seed=seeds, language=languages)
@settings(max_examples=40, deadline=None)
def test_filler_holds_no_digits_no_leftover_slots_and_no_sentence_twice(seed, language):
    sentences = filler(Random(seed), 700, language)
    assert len(set(sentences)) == len(sentences)
    for sentence in sentences:
        assert not any(char.isdigit() or char in "{}" for char in sentence)
        assert sentence[0] == sentence[0].upper()
        assert sentence[-1] in ".。"


@given(seed=seeds, language=languages)
@settings(max_examples=30, deadline=None)
def test_two_fillers_share_few_long_phrases(seed, language):
    first, second = (
        VOCABULARIES[language].joint.join(filler(Random(number), 600, language))
        for number in (seed, seed + 1)
    )
    length = 8 if language == "en" else 10 if language != "zh" else 14
    ours, theirs = _grams(first, length), _grams(second, length)
    assert len(ours & theirs) / len(ours) < 0.1


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_filler_never_speaks_of_what_suites_ask_about(seed):
    text = " ".join(filler(Random(seed), 800)).lower()
    for word in ("code", "secret", "safe", "train", "number", "room", "key", "vault", "password"):
        assert word not in text.replace(".", " ").replace(",", " ").split()


def test_filler_is_the_same_for_the_same_seed_only():
    assert filler(seeded(1, "a"), 300) == filler(seeded(1, "a"), 300)
    assert filler(seeded(1, "a"), 300) != filler(seeded(1, "b"), 300)
    assert filler(seeded(1, "a"), 300) != filler(seeded(2, "a"), 300)


@pytest.mark.parametrize("words", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_every_phrase_of_a_vocabulary_is_there_once_and_every_slot_is_known(words):
    for phrases in (
        words.names, words.times, words.verbs, words.things, words.places, words.tails,
        words.shapes, words.owners,
    ):  # fmt: skip
        assert len(set(phrases)) == len(phrases) >= 9
    known = dict.fromkeys(("name", "other", "time", "verb", "thing", "place", "tail"), "x")
    for shape in words.shapes:
        shape.format(**known)
    fact = words.code_fact.format(owner=words.owners[0], code="12345")
    assert fact.startswith(words.code_answer.format(owner=words.owners[0]))
    assert words.owners[0] in words.code_question.format(owner=words.owners[0])


@given(
    count=st.integers(1, 40),
    facts=st.lists(st.floats(0, 1), max_size=5),
)
def test_every_fact_stands_at_its_depth(count, facts):
    sentences = [f"s{number}" for number in range(count)]
    placed = [(depth, f"f{number}") for number, depth in enumerate(facts)]
    told = with_facts(sentences, placed).split()
    assert [unit for unit in told if unit[0] == "s"] == sentences
    assert sorted(unit for unit in told if unit[0] == "f") == sorted(fact for _, fact in placed)
    for depth, fact in placed:
        before = sum(unit[0] == "s" for unit in told[: told.index(fact)])
        assert abs(before - depth * count) <= 0.5


def test_facts_of_one_place_keep_their_order():
    assert with_facts(["s"], [(0.0, "a"), (1.0, "c"), (0.0, "b")]) == "a b s c"


@given(seed=seeds, count=st.integers(1, 80))
def test_numbers_and_words_never_collide(seed, count):
    for made in (
        numbers(Random(seed), count, 5),
        hex_words(Random(seed), count, 5),
        coined_words(Random(seed), count),
    ):
        assert len(set(made)) == count
    assert all(len(made) == 5 and made[0] != "0" for made in numbers(Random(seed), count, 5))
    assert all(len(made) == 5 and int(made, 16) >= 0 for made in hex_words(Random(seed), count, 5))


def test_a_coined_word_is_no_word_of_any_vocabulary():
    coined = set(coined_words(Random(0), 3000))
    for words in VOCABULARIES.values():
        phrases = (*words.names, *words.things, *words.places, *words.tails, *words.verbs)
        assert not coined & {word.lower() for phrase in phrases for word in phrase.split()}


@pytest.mark.parametrize(
    ("value", "text", "named"),
    [
        ("48213", "It is 48213.", True),
        ("48213", "密码是48213。", True),
        ("48213", "148213", False),
        ("48213", "482130", False),
        ("bradil", "It was BRADIL, I think", True),
        ("bradil", "bradilo", False),
        ("a.c", "abc", False),
        ("48213", "", False),
    ],
)
def test_a_value_counts_only_as_a_word_of_its_own(value, text, named):
    assert names(value, text) is named


def test_neighbouring_sentences_differ_in_more_than_a_word():
    sentences = filler(Random(3), 1000)
    shared = [len(_grams(one, 3) & _grams(two, 3)) for one, two in pairwise(sentences)]
    assert sum(shared) / len(shared) < 0.5
