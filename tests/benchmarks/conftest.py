"""Benchmarks are scripts beside each other: they are found by their folder, as when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
