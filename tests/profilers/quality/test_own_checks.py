import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.profilers.quality.own_checks import KINDS, read_check, token_f1, worth

CHECKER = """
def long_enough(answer, line):
    return len(answer) >= line["least"]

def share(answer, line):
    return 0.25

def trips(answer, line):
    raise ValueError("no digit")

def odd(answer, line):
    return "yes"

number = 3
"""


@pytest.fixture
def checker(tmp_path, monkeypatch):
    """A name for a module in the working directory; each test has its own."""
    name = f"checker_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CHECKER)
    monkeypatch.chdir(tmp_path)
    return name


def judged(check: object, text: str, **line: object) -> tuple[float, str]:
    return worth(read_check(check, None), line, text)


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        ({"exact": "7194"}, " 7194\n", 1),
        ({"exact": "7194"}, "It is 7194", 0),
        ({"contains": "Green"}, "a green door", 1),
        ({"contains": ["green", "door", "red", "lamp"]}, "a green door", 0.5),
        ({"regex": r"\b\d{4}\b"}, "It is 7194.", 1),
        ({"regex": r"^\d{4}$"}, "It is 7194.", 0),
        ({"json-schema": {"type": "object", "required": ["a"]}}, '```json\n{"a": 1}\n```', 1),
        ({"json-schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', 0),
        ({"json-schema": {}}, "no JSON", 0),
        ({"json-schema": {"type": "null"}}, "null", 1),
    ],
)
def test_an_answer_is_worth_what_its_check_says(check, text, expected):
    value, why = judged(check, text)
    assert value == expected
    assert bool(why) == (expected < 1)


def test_exact_and_contains_may_stand_for_the_reference():
    assert read_check("exact", "7194") == read_check({"exact": "7194"}, None)
    assert worth(read_check("contains", "green"), {}, "a Green door")[0] == 1
    with pytest.raises(BadInput, match="reference"):
        read_check("exact", None)


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("regex", "object with one of"),
        ({}, "object with one of"),
        ({"exact": "a", "regex": "b"}, "object with one of"),
        ({"exactly": "a"}, "object with one of"),
        ({"exact": ""}, "not empty"),
        ({"contains": []}, "not empty"),
        ({"contains": ["a", 3]}, "not empty"),
        ({"regex": "("}, "no regular expression"),
        ({"json-schema": {"type": "thing"}}, "no JSON schema"),
        ({"python": "checker"}, "module:function"),
        ({"python": "no_such_module_here:check"}, "cannot be imported"),
    ],
)
def test_a_check_that_cannot_work_is_refused_before_anything_is_asked(check, why):
    with pytest.raises(BadInput, match=why):
        read_check(check, None)


def test_a_function_of_the_working_directory_is_asked(checker):
    check = {"python": f"{checker}:long_enough"}
    assert judged(check, "long enough", least=5) == (1, "")
    assert judged(check, "short", least=9)[0] == 0
    assert judged({"python": f"{checker}:share"}, "x")[0] == 0.25


def test_a_function_that_trips_or_returns_no_number_says_no_and_why(checker):
    assert judged({"python": f"{checker}:trips"}, "x") == (
        0,
        f"{checker}:trips raised ValueError: no digit",
    )
    value, why = judged({"python": f"{checker}:odd"}, "x")
    assert value == 0
    assert "not a number from 0 to 1" in why


def test_what_is_no_function_is_refused(checker):
    for name in ("number", "missing"):
        with pytest.raises(BadInput, match=f"no function '{name}'"):
            read_check({"python": f"{checker}:{name}"}, None)


def test_a_module_that_fails_to_load_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_checker_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        read_check({"python": "broken_checker_module:check"}, None)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("The green door", "the green door", 1),
        ("red lamp", "green door", 0),
        ("a green door", "the green door", 2 / 3),  # two of three words on both sides
        ("green green", "green", 2 / 3),  # one shared; two and one words
        ("", "", 1),
        ("", "door", 0),
    ],
)
def test_shared_words_count(text, reference, expected):
    assert token_f1(text, reference) == pytest.approx(expected)


@given(one=st.text(max_size=30), two=st.text(max_size=30))
def test_shared_words_are_symmetric_and_a_share(one, two):
    assert token_f1(one, two) == token_f1(two, one)
    assert 0 <= token_f1(one, two) <= 1
    assert token_f1(one, one) == 1


def test_every_kind_that_is_offered_can_be_read():
    assert set(KINDS) == {"exact", "contains", "regex", "json-schema", "python", "judge"}
    for kind in KINDS:
        with pytest.raises(BadInput):
            read_check({kind: 3}, None)
