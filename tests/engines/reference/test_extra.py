"""Without its extra, the reference engine says what to install."""

import importlib
import importlib.util

import pytest

import kvtune.engines.reference
from kvtune.errors import MissingExtra


@pytest.mark.parametrize("missing", ["torch", "transformers", "safetensors"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(MissingExtra, match=missing) as caught:
        importlib.reload(kvtune.engines.reference)
    assert "kvtune[reference]" in caught.value.fix
