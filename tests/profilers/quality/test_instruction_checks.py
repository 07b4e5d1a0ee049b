import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.quality.instruction_checks import CHECKS, check, holds, sentences

STORY = "The mill is old. Rosa sells bread there! Who buys it? Mr. Holm does, at 5 p.m. on Fridays."
TWO = "The mill is old.\n\nRosa sells bread."

EXAMPLES = [
    # kind, parameters, a text that follows, a text that does not
    ("words", {"relation": "at most", "count": 3}, "Three small words.", "These are four words."),
    ("words", {"relation": "at least", "count": 4}, "These are four words", "Only three words"),
    ("words", {"relation": "fewer than", "count": 3}, "Two words", "Now three words"),
    ("words", {"relation": "exactly", "count": 4}, "I don't know", "I do know"),
    ("sentences", {"relation": "exactly", "count": 4}, STORY, STORY + " Yes."),
    ("sentences", {"relation": "at least", "count": 2}, "One. Two", "It is 3.5 m wide"),
    ("sentences", {"relation": "at most", "count": 1}, "No. 5 is J. Smith's.", "One! Two!"),
    ("paragraphs", {"relation": "exactly", "count": 2}, TWO, TWO.replace("\n\n", "\n")),
    ("divided-paragraphs", {"count": 2}, "One.\n***\nTwo.", "One.\n\nTwo."),
    ("divided-paragraphs", {"count": 2}, "*** One. *** Two. ***", "One. *** *** Two."),
    ("paragraph-start", {"count": 2, "index": 2, "word": "rosa"}, TWO, TWO.replace("Rosa", "He")),
    ("paragraph-start", {"count": 2, "index": 1, "word": "the"}, '"The"\n\nX', TWO + "\n\nEnd."),
    ("bullets", {"relation": "exactly", "count": 2}, "* one\n- two", "* one\n- two\n* three"),
    ("bullets", {"relation": "at least", "count": 1}, "  - one", "*one* and -two\n-3 degrees\n---"),
    ("numbered", {"relation": "exactly", "count": 2}, "1. one\n2) two", "1. one\n3. two"),
    ("numbered", {"relation": "at least", "count": 2}, "1. a\n2. b\n3. c", "1. a"),
    ("sections", {"marker": "Section", "count": 2}, "Section 1\nA\nSection 2\nB", "Section 1\nA"),
    ("title", {}, "<<A mill>> It is old.", "<A mill> It is old."),
    ("title", {}, "It is old.\n<<Mill>>", "<< >> and <<two\nlines>>"),
    ("highlights", {"count": 2}, "*one* and **two**", "*one* and two"),
    ("highlights", {"count": 1}, "so **very** old", "** ** or * a\nb *"),
    ("placeholders", {"count": 2}, "Dear [name], in [town]", "Dear [name]"),
    ("postscript", {"marker": "P.S."}, "Bye.\n\nP.S. Bring bread.", "Bye. PS bring bread."),
    ("postscript", {"marker": "P.P.S"}, "P.S. One\nP. P. S. Two", "P.S. One"),
    ("one-of", {"options": ["My answer is yes.", "My answer is no."]}, "My answer is no.", "No."),
    ("two-answers", {}, "Yes.\n******\nNo.", "Yes.\n******\nYes."),
    ("two-answers", {}, "A ****** B ******", "A ****** B ****** C"),
    ("json", {}, '```json\n{"a": [1, 2]}\n```', 'Here it is: {"a": 1}'),
    ("json", {}, "[1, 2]", '{"a": NaN}'),
    ("json", {}, ' {"a": null} ', '"only text"'),
    ("json", {"keys": ["name"]}, '{"name": "Rosa", "x": 1}', '{"names": "Rosa"}'),
    ("keywords", {"words": ["mill", "bread"]}, "Windmills and BREAD", "The mill is old."),
    ("keyword-count", {"word": "mill", "relation": "at least", "count": 2}, "Mill, mills", "mill"),
    ("keyword-count", {"word": "a.c", "relation": "at most", "count": 0}, "abc", "a.c"),
    ("forbidden-words", {"words": ["mill"]}, "The windmill is old.", "The MILL is old."),
    ("letter-count", {"letter": "Z", "relation": "at least", "count": 2}, "Zoo, jazz", "zoo"),
    ("letter-count", {"letter": "e", "relation": "fewer than", "count": 1}, "A tall oak", "E"),
    ("capital-words", {"relation": "exactly", "count": 2}, "I saw a DON'T-WALK sign", "I saw it"),
    ("order", {"words": ["mill", "bread"]}, "The Mill sells bread to millers.", "bread, mill"),
    ("order", {"words": ["mill", "bread"]}, "mill bread mill", "The mill is old."),
    ("upper", {}, "THE MILL IS OLD AND IT IS BY THE RIVER, 3 KM AWAY.", "THE MILL IS Old AND BIG."),
    ("upper", {}, "THE BREAD IS IN THE OVEN.", "DER HUND IST NICHT IN DEM HAUS."),
    ("lower", {}, "the mill is old and it is by the river.", "The mill is old and it is small."),
    ("lower", {}, "the bread is in the oven.", "der hund ist nicht in dem haus."),
    ("no-commas", {}, "The mill is old; it is small.", "The mill is old, and small."),
    ("quoted", {}, ' "The mill is old." ', '"The mill" is old.'),
    ("quoted", {}, '""', '"'),
    ("language", {"language": "de"}, "Die Mühle ist alt und steht an dem Fluss.", STORY),
    ("start", {"phrase": "Dear reader"}, '"Dear Reader, hello', "Hello, dear reader"),
    ("end", {"phrase": "That is all."}, 'Old. "that is all." ', "That is all. Bye."),
    ("repeat", {"request": "Describe it. "}, " describe it. It is old.", "Describe. It is old."),
]


@pytest.mark.parametrize(("kind", "parameters", "good", "bad"), EXAMPLES)
def test_check_tells_who_follows(kind, parameters, good, bad):
    assert check(kind, parameters, good)
    assert not check(kind, parameters, bad)


def test_every_kind_has_an_example():
    assert {kind for kind, *_ in EXAMPLES} == set(CHECKS)


@pytest.mark.parametrize(("kind", "parameters"), [(kind, rest[0]) for kind, *rest in EXAMPLES])
def test_an_empty_text_follows_nothing(kind, parameters):
    assert not check(kind, parameters, " \n")


@given(text=st.text(max_size=60))
def test_any_text_is_judged(text):
    for kind, parameters, *_ in EXAMPLES:
        assert check(kind, parameters, text) in (True, False)


def test_unknown_kinds_and_relations_are_refused():
    with pytest.raises(KeyError, match="wrods"):
        check("wrods", {}, "text")
    with pytest.raises(KeyError, match="about"):
        holds("about", 1, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Holm met Mrs. Rosa Lind. They ate bread, cake, etc. and left.", 2),
        ('He asked: "Why?" She said: "No." Then they left.', 3),
        ("1. Bread is made here.\n2. Cake is sold there.", 2),
        ("It costs 3.50 in all. That is cheap!", 2),
        ("They met at 5 p.m. in the mill. She left at 6 p.m. He stayed.", 3),
        ("the mill is old. it is small.", 2),
        ("Wait... what? Yes!!! Good.", 3),
        ("So it was I. Nobody else came.", 2),
        ("犬がいます。猫もいます！", 2),
        ("no end mark", 1),
        ("...", 0),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, expected):
    assert len(sentences(text)) == expected


@given(
    parts=st.lists(
        st.sampled_from(["The mill is old", "Rosa sells bread", "Who knows", "It is 3.5 m wide"]),
        max_size=8,
    ),
    marks=st.lists(st.sampled_from([".", "!", "?", "...", '."']), min_size=8, max_size=8),
)
def test_sentences_are_counted_as_they_were_written(parts, marks):
    text = " ".join(part + mark for part, mark in zip(parts, marks, strict=False))
    assert len(sentences(text)) == len(parts)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values, fenced=st.booleans())
def test_what_json_writes_is_json_and_with_words_around_it_is_not(value, fenced):
    text = json.dumps(value)
    if fenced:
        text = f"```json\n{text}\n```"
    assert check("json", {}, text) == isinstance(value, dict | list)
    assert not check("json", {}, f"Here: {text} done")
