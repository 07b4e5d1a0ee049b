import pytest
from contracts.store_values import DEVICE, ENGINE
from hypothesis import given
from hypothesis import strategies as st

from kvtune.store import point_key

POINT = {
    "model": "some/model",
    "engine": ENGINE,
    "device": DEVICE,
    "workload_digest": "abc",
    "arguments": {"block-size": 16},
    "settings": {"requests": 200},
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another/model"},
        {"engine": ENGINE.model_copy(update={"version": "0.12.0"})},
        {"engine": ENGINE.model_copy(update={"name": "simulated"})},
        {"device": DEVICE.model_copy(update={"count": 1})},
        {"workload_digest": "abd"},
        {"arguments": {"block-size": 32}},
        {"arguments": {}},
        {"settings": {"requests": 100}},
    ],
)
def test_whatever_a_figure_depends_on_changes_the_key(change):
    assert point_key(**{**POINT, **change}) != point_key(**POINT)


def test_what_no_figure_depends_on_does_not_change_the_key():
    engine = ENGINE.model_copy(update={"python": "/elsewhere/python3", "tested": False})
    assert point_key(**{**POINT, "engine": engine}) == point_key(**POINT)


@given(st.dictionaries(st.text(), st.integers(), min_size=2), st.randoms())
def test_order_of_arguments_does_not_change_the_key(arguments, random):
    items = list(arguments.items())
    random.shuffle(items)
    shuffled = point_key(**{**POINT, "arguments": dict(items)})
    assert shuffled == point_key(**{**POINT, "arguments": arguments})
