"""What all tests need: contracts that explain their failures, and an interrupt that arrives."""

import signal

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("contracts")

# A runner that was started in the background ignores Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")
