"""Why settings that may change answers are tried, in words."""

import pytest
from contracts.landscape import GOAL
from contracts.studies import measured, stack

from kvtune.autotune.explore.unlock import unlock_reason
from kvtune.autotune.ledger import Entry
from kvtune.types import Trial

LATE, IN_TIME = measured(1.0, ttft_s=2.0), measured(1.0, ttft_s=0.5)


def entry(number, found, arguments):
    trial = Trial(number=number, stack=stack(arguments), base_arguments={}, repeats=1, seed=0)
    return Entry(trial, found, reused=False)


POINTS = [entry(0, LATE, {}), entry(1, LATE, {"a": 1}), entry(2, IN_TIME, {"kv-bits": 4})]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"is_asked_for": True}, "it was asked for"),
        ({"has_lossless": False}, "no lossless setting can be searched here"),
        ({"is_exhausted": True}, "no lossless configuration is left"),
        (
            {"is_unlikely": True},
            "no lossless configuration that is left is likely to meet the goal",
        ),
        ({}, "the lossless share of the budget is spent and the goal is missed"),
    ],
)
def test_the_reason_is_said_with_how_lossless_trials_stood(given, why):
    usual = {"is_asked_for": False, "has_lossless": True, "is_exhausted": False}
    told = {**usual, "is_unlikely": False, **given}
    assert unlock_reason(GOAL, POINTS, **told) == (
        f"settings that may change answers are tried from here on: {why}; "
        "0 of 2 lossless trials met the goal by then"
    )
