"""The real model that integration tests serve."""

import os

import pytest


@pytest.fixture(scope="session")
def model():
    path = os.environ.get("KVTUNE_TEST_MODEL")
    if not path:
        pytest.fail("set KVTUNE_TEST_MODEL to a checkpoint directory, or run: make integration")
    return path
