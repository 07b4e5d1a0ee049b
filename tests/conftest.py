"""What all tests need: contracts that explain their failures, and an interrupt that arrives."""

import os
import signal

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("contracts")

# Each of several workers would have threads of numpy's and torch's for every core, which wait by
# spinning.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runner that was started in the background ignores Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")
