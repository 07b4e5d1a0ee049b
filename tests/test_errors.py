"""Every error says what happened and what to do, and has an exit code."""

import inspect

import pytest

from kvtune import errors
from kvtune.errors import BadTrace, EngineError, KvtuneError
from kvtune.types import FailureClass

CODES = {
    "KvtuneError": 2,
    "BadInput": 2,
    "BadTrace": 2,
    "BadGoal": 2,
    "NotFound": 2,
    "MissingExtra": 2,
    "StoreError": 3,
    "EngineError": 3,
}


def test_every_error_has_the_exit_code_that_is_promised():
    found = {
        name: cls.exit_code
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, KvtuneError)
    }
    assert found == CODES


@pytest.mark.parametrize(
    "name", [name for name in CODES if name not in ("BadTrace", "EngineError")]
)
def test_an_error_keeps_its_message_and_its_fix(name):
    error = getattr(errors, name)("what happened", "what to do")
    assert (str(error), error.message, error.fix) == (
        "what happened",
        "what happened",
        "what to do",
    )


def test_a_bad_trace_names_the_line():
    error = BadTrace("w.jsonl", 7, "it is no JSON", "mend it")
    assert str(error) == "w.jsonl, line 7: it is no JSON"
    assert (error.path, error.line, error.reason, error.fix) == (
        "w.jsonl",
        7,
        "it is no JSON",
        "mend it",
    )


def test_an_engine_error_carries_its_class_and_the_log():
    error = EngineError(FailureClass.DOES_NOT_FIT, "too small", "give more", "the last line")
    assert error.failure is FailureClass.DOES_NOT_FIT
    assert error.log_excerpt == "the last line"
