"""Positions of modules: sums of the sizes before, the largest of a union, room for arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import BadInput
from kvtune.policies.prompt_schema import Module, Parameter, Run, Schema, Union


def module(name, size, *more):
    return Module(name, (tuple(range(size)), *more))


def starts(schema):
    return {name: placed.start for name, placed in schema.modules.items()}


def test_a_union_takes_the_room_of_its_largest_member():
    schema = Schema([module("a", 50), Union((module("b", 30), module("c", 60))), module("d", 10)])
    assert starts(schema) == {"a": 0, "b": 50, "c": 50, "d": 110}
    assert schema.end == 120


def test_sizes_50_and_60_put_the_third_module_at_110():
    assert starts(Schema([module("a", 50), module("b", 60), module("c", 1)]))["c"] == 110


def test_modules_inside_take_their_room_between_their_parents_tokens():
    inner = Union((module("x", 4), module("y", 7)))
    schema = Schema([Module("a", ((1, 2), inner, (3,), Parameter("p", 5), (4,))), module("b", 1)])
    outer = schema.modules["a"]
    assert outer.runs == (Run(0, (1, 2)), Run(9, (3,)), Run(15, (4,)))
    assert outer.parameters == {"p": (10, 5)}
    assert (outer.start, outer.end) == (0, 16)
    assert starts(schema) == {"a": 0, "x": 2, "y": 2, "b": 16}
    assert schema.modules["x"].parent == "a"


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6))
def test_every_start_is_the_sum_of_the_rooms_before(sizes):
    parts = [
        Union(tuple(module(f"{n}.{m}", size) for m, size in enumerate(group)))
        for n, group in enumerate(sizes)
    ]
    found = starts(Schema(parts))
    for n, group in enumerate(sizes):
        for m in range(len(group)):
            assert found[f"{n}.{m}"] == sum(max(before) for before in sizes[:n])


def test_an_argument_takes_the_first_of_its_parameters_positions():
    schema = Schema([Module("a", ((1,), Parameter("p", 3), (2,), Parameter("q", 2)))])
    given_ = {"q": [8], "p": [5, 6]}
    assert schema.arguments(["a"], given_) == [Run(1, (5, 6)), Run(5, (8,))]


def test_an_argument_longer_than_its_room_is_refused():
    schema = Schema([Module("a", (Parameter("p", 3),))])
    assert schema.arguments(["a"], {"p": [1, 2, 3]})
    with pytest.raises(BadInput, match="room for 3 tokens, and its argument has 4"):
        schema.arguments(["a"], {"p": [1, 2, 3, 4]})
    with pytest.raises(BadInput, match="no module of the prompt has a parameter 'x'"):
        schema.arguments(["a"], {"x": [1]})
    with pytest.raises(BadInput, match="parameter 'p'"):
        schema.arguments([], {"p": [1]})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b", "c"], "alternatives"),
        (["nobody"], "no module"),
        (["a", "a"], "twice"),
        (["inside"], "inside 'a'"),
    ],
)
def test_prompts_that_the_schema_does_not_have_are_refused(names, message):
    schema = Schema([module("a", 5, module("inside", 2)), Union((module("b", 3), module("c", 6)))])
    schema.check(["c", "a", "inside"])
    with pytest.raises(BadInput, match=message):
        schema.check(names)


@pytest.mark.parametrize(
    ("parts", "scaffolds", "message"),
    [
        ([module("a", 1), module("a", 2)], [], "two modules"),
        ([Module("a", (Parameter("p", 1), Parameter("p", 1)))], [], "two parameters"),
        ([Module("a", (Parameter("p", 1),)), Module("b", (Parameter("p", 1),))], [], "two param"),
        ([Module("a", (Parameter("p", 0),))], [], "no room"),
        ([module("a", 1)], [["b"]], "no module"),
        ([Union((module("a", 1), module("b", 1)))], [["a", "b"]], "alternatives"),
    ],
)
def test_schemas_that_contradict_themselves_are_refused(parts, scaffolds, message):
    with pytest.raises(BadInput, match=message):
        Schema(parts, scaffolds)


def test_a_scaffold_is_used_where_all_of_it_is_there():
    schema = Schema([module(name, 1) for name in "abcd"], [["a", "b"], ["b", "c"]])
    assert list(schema.encoded_together(["d", "c", "b", "a"])) == [("a", "b"), ("d",), ("c",)]
    assert list(schema.encoded_together(["c", "b"])) == [("b", "c")]
    assert list(schema.encoded_together(["a"])) == [("a",)]
