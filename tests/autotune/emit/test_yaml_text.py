import pytest
import yaml
from contracts.emitter_samples import NASTY, numbers, text
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.emit.yaml_text import Noted, scalar, to_yaml

leaves = text | numbers | st.booleans() | st.none()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=12,
)


def load(lines: list[str]) -> object:
    return yaml.safe_load("\n".join(lines) + "\n")


@given(st.dictionaries(text, trees, min_size=1, max_size=4))
def test_any_mapping_comes_back_as_it_was(mapping):
    assert load(to_yaml(mapping)) == mapping


def with_notes(node: object) -> object:
    if isinstance(node, dict):
        return {key: Noted(with_notes(value), ["# note: [x", ""]) for key, value in node.items()}
    if isinstance(node, list):
        return [Noted(with_notes(value), ["# - note"]) for value in node]
    return node


@given(st.dictionaries(text, trees, min_size=1, max_size=4))
def test_comments_change_nothing(mapping):
    assert load(to_yaml(with_notes(mapping))) == mapping


@pytest.mark.parametrize("value", NASTY)
def test_every_string_is_one_line_of_ascii(value):
    written = scalar(value)
    assert written.isascii()
    assert written.isprintable()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("chat", "chat"),
        ("--max-num-seqs", "--max-num-seqs"),
        ("/health", "/health"),
        ("0o17", '"0o17"'),
        ("yes", '"yes"'),
        ("NULL", '"NULL"'),
        ("1.0", '"1.0"'),
        ("---", '"---"'),
        ('{"a":1}', "'{\"a\":1}'"),
        ('it\'s "both"', '"it\'s \\"both\\""'),
        ("é", '"\\xE9"'),
        ("😀", '"\\U0001F600"'),
        (True, "true"),
        (None, "null"),
        (7, "7"),
        (0.1, "0.1"),
        (1e-05, "1.0e-05"),
        (float("inf"), ".inf"),
        (float("-inf"), "-.inf"),
    ],
)
def test_strings_are_quoted_where_some_reader_would_see_something_else(value, written):
    assert scalar(value) == written


def test_comment_stands_above_its_value():
    lines = to_yaml({"a": Noted([Noted("b", ["# why b"])], ["# why a"])})
    assert lines == ["# why a", "a:", "  # why b", "  - b"]
