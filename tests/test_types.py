"""The vocabulary: frozen, strict, and of one spelling wherever it is written down."""

import importlib
import json
import pkgutil

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune import types
from kvtune.types import (
    Choice,
    Device,
    Goal,
    Harm,
    Measurement,
    PolicyStack,
    RequestRecord,
    Slo,
    Trial,
    fingerprint_of,
)

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats(allow_nan=False))
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)


@given(trees)
def test_a_fingerprint_survives_json_and_the_order_of_names(value):
    again = json.loads(json.dumps(value))
    assert fingerprint_of(again) == fingerprint_of(value)
    if isinstance(value, dict):
        assert fingerprint_of(dict(reversed(value.items()))) == fingerprint_of(value)


def test_a_fingerprint_is_what_it_was_yesterday():
    """SHA-256 of `{"a":[1,"\\u00e9"]}`: stored keys depend on it."""
    assert fingerprint_of({"a": [1, "é"]}) == "83a175c500b5b96c"


def test_a_stored_value_cannot_be_changed_and_refuses_what_it_does_not_know():
    slo = Slo(metric="ttft", statistic="p95", limit_s=1.0)
    with pytest.raises(pydantic.ValidationError):
        slo.limit_s = 2.0
    with pytest.raises(pydantic.ValidationError):
        Slo(metric="ttft", statistic="p95", limit_s=1.0, unit="s")
    with pytest.raises(pydantic.ValidationError):
        Goal.model_validate({"schema_version": 2})


def test_a_measurement_from_before_answers_were_looked_at_still_loads():
    old = {"schema_version": 1, "status": "ok", "metrics": {"x": [1.0]}, "canary_answers": ["a"]}
    assert Measurement.model_validate_json(json.dumps(old)).outputs is None


def test_every_value_of_the_vocabulary_is_imported_from_one_place():
    modules = [
        importlib.import_module(f"{types.__name__}.{info.name}")
        for info in pkgutil.iter_modules(types.__path__)
    ]
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    }
    assert {"RequestRecord", "Profile", "QualityReport", "Decision", "Harm"} <= defined
    assert defined <= set(types.__all__)


def choice(harm=Harm.LOSSLESS, **arguments):
    return Choice(policy="p", parameters={}, arguments=arguments, harm=harm)


def test_a_stack_is_as_harmful_as_its_worst_choice():
    assert PolicyStack().harm is Harm.LOSSLESS
    worst = PolicyStack(choices=(choice(Harm.LOSSY), choice(Harm.NEAR_LOSSLESS), choice()))
    assert worst.harm is Harm.LOSSY


def test_later_choices_and_the_stack_win():
    stack = PolicyStack(choices=(choice(a=1, b=1), choice(b=2)))
    assert stack.arguments == {"a": 1, "b": 2}
    trial = Trial(number=0, stack=stack, base_arguments={"a": 0, "c": 0}, repeats=1, seed=0)
    assert trial.arguments == {"a": 1, "b": 2, "c": 0}


def test_a_device_is_keyed_by_what_figures_depend_on():
    device = Device(kind="cuda", name="H200", count=2, memory_bytes=1, driver="1")
    assert device.key == "cuda:H200:2"


@pytest.mark.parametrize(
    ("first_token_s", "error", "ok"), [(0.1, None, True), (None, None, False), (0.1, "cut", False)]
)
def test_a_request_is_ok_when_it_completed_with_a_token(first_token_s, error, ok):
    record = RequestRecord(0, 0.0, 0.0, first_token_s, 1.0, (), 1, 1, 1, error=error)
    assert record.ok is ok
