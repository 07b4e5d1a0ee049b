"""JSON that any reader takes, whatever figures were stored."""

import json
import math

import pytest
from contracts.studies import measured
from hypothesis import given
from hypothesis import strategies as st

from kvtune.autotune.strict_json import strict_json

VALUES = st.recursive(
    st.floats() | st.text() | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def strictly(text):
    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def without(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [without(each) for each in value]
    return {n: without(v) for n, v in value.items()} if isinstance(value, dict) else value


@given(VALUES)
def test_only_what_is_no_number_is_lost(value):
    assert strictly(strict_json(value)) == without(value)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_stored_models_are_written_with_null_for_what_is_no_number(odd):
    found = strictly(strict_json([measured(odd, start_s=odd)]))[0]
    assert found["metrics"]["goodput_requests_per_s"] == [None]
    assert found["start_s"] is None
    assert found["status"] == "ok"
