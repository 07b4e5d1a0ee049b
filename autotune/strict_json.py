"""Stored values as JSON that every reader takes: what it lacks, NaN and infinity, is null."""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic_core import to_jsonable_python


def strict_json(value: object) -> str:
    """Write models, data classes and plain values as JSON; a number that is none is null."""
    return json.dumps(_finite(to_jsonable_python(value)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value
