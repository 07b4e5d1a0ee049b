"""Makes `tests/contracts` importable for the tests of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
pytest.register_assert_rewrite("contracts.emitter")
