"""A server that does not exist: what a run on it would have recorded."""

from __future__ import annotations

import random

import pytest

from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.types import Interval, StepTimeModel


def _interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate=estimate, low=low, high=high, unit="s")


@pytest.fixture
def some_requests():
    """Makes requests of many lengths, all unlike each other."""

    def make(count: int = 48, prompt: int = 200, output: int = 30) -> list[SimulatedRequest]:
        numbers = random.Random(5)
        return [
            SimulatedRequest(
                length := numbers.randint(prompt // 2, prompt * 3 // 2),
                numbers.randint(output // 2, output * 3 // 2),
                [numbers.randrange(1 << 40) for _ in range(length)],
            )
            for _ in range(count)
        ]

    return make


@pytest.fixture
def model_of():
    """Makes the step-time model of a `StepCost`, its intervals `spread` wide to each side."""

    def make(cost, spread: float = 0.1) -> StepTimeModel:
        parts = {
            name: _interval(value, value * (1 - spread), value * (1 + spread))
            for name in ("fixed_s", "per_sequence_s", "per_kv_token_s")
            for value in [getattr(cost, name)]
        }
        return StepTimeModel(source="probe", observations=100, error_share=0.01, **parts)

    return make
