import sys
from pathlib import Path

import pytest

# Test folders are no packages: this is how a test finds the contract that it subclasses.
sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.register_assert_rewrite("contracts")
