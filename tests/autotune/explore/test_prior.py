import random

import pytest
from contracts.forecast_baseline import CPU, context

from kvtune.autotune.explore.prior import Foretold, Prior, simulated_by
from kvtune.autotune.forecast.predict import make_forecaster
from kvtune.autotune.forecast.replay import simulate
from kvtune.autotune.forecast.requests import SimulatedRequest
from kvtune.autotune.forecast.step_cost import StepCost
from kvtune.autotune.forecast.system import as_reported, system_of
from kvtune.profilers.load.arrivals import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Goal, Request

PLAN = LoadPlan(ClosedLoop(8))


@pytest.fixture(scope="module")
def forecaster():
    """A pool that eight requests of some 250 tokens fill more than once."""
    numbers = random.Random(1)
    sent = [
        SimulatedRequest(200, 30, [numbers.randrange(1 << 40) for _ in range(200)])
        for _ in range(24)
    ]
    ctx = context(device=CPU, blocks=100)
    reported = as_reported(ctx)
    system = system_of(reported.base_arguments, reported)
    cost = StepCost(0.02, per_sequence_s=2e-4, per_kv_token_s=1e-5, per_prefill_token_s=3e-4)
    run = simulate(sent, PLAN.arrivals, system, cost).run
    requests = [Request(token_ids=tuple(one.content), output_tokens=30) for one in sent]
    return make_forecaster(requests, PLAN, run, Goal(), ctx, None)


def test_stock_defaults_give_what_was_measured(forecaster):
    told = simulated_by(forecaster)({})
    measured = forecaster.calibration.measured["output_tokens_per_s"]
    assert told.figures["output_tokens_per_s"] == pytest.approx(measured, rel=0.05)


def test_fewer_at_once_are_told_apart_from_many(forecaster):
    foretell = simulated_by(forecaster)
    stock, narrow = foretell({}), foretell({"max-num-seqs": 1})
    assert narrow.figures["requests_per_s"] < 0.7 * stock.figures["requests_per_s"]
    assert narrow.course != stock.course


def test_widths_that_no_load_reaches_are_the_same_point(forecaster):
    foretell = simulated_by(forecaster)
    assert foretell({"max-num-seqs": 32}).course == foretell({}).course
    assert foretell({"max-num-seqs": 32}).course != foretell({"max-num-seqs": 2}).course


@pytest.mark.parametrize("argument", [{"prefix-caching-hash-algo": "sha256_cbor"}, {"seed": 3}])
def test_what_a_simulation_does_not_know_is_never_the_same_point(forecaster, argument):
    foretell = simulated_by(forecaster)
    assert foretell(argument).figures == foretell({}).figures
    assert foretell(argument).course != foretell({}).course


def test_nothing_is_told_of_what_would_not_start(forecaster):
    assert simulated_by(forecaster)({"max-num-seqs": 64, "max-num-batched-tokens": 16}) is None
    # 3 blocks of 256 tokens, one of them reserved, do not hold the longest request.
    assert simulated_by(forecaster)({"num-gpu-blocks-override": 2}) is None


def test_each_point_is_asked_for_once():
    asked = []

    def foretell(arguments):
        asked.append(dict(arguments))
        return Foretold({}, 0)

    prior = Prior(foretell)
    for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {}):
        prior.of(arguments)
    assert asked == [{"a": 1, "b": 2}, {}]
    assert Prior(None).of({}) is None
