"""A whole search at the boundary, on simulated servers: each trial is measured at its own load."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.landscape import Recorder, workload

from kvtune.autotune.climb import Climbs
from kvtune.autotune.gates import Gates
from kvtune.autotune.ledger import RUNG_BASELINE, RUNG_LOSSLESS, Entry
from kvtune.autotune.limits import Budget
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import (
    Choice,
    Goal,
    Harm,
    Measurement,
    Outcome,
    PolicyStack,
    Request,
    Slo,
    Status,
    Trial,
)

PLAN = LoadPlan(ClosedLoop(4), warmup_requests=2, at_boundary=True)
QUICK = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=0.1),))
"""Three times what a request takes here alone, so that a busy machine does not decide alone."""
BASE = {
    "max-model-len": 2048,
    "kv-cache-memory-bytes": 64 << 20,
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256",
    "max-num-seqs": 2,
    "max-num-active-seqs": 2,
    "max-num-batched-tokens": 512,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.0,
}
"""Two requests at a time, so that others wait: the more, the longer."""


def load_of(count=24):
    asked = tuple(Request(input_tokens=32 + number, output_tokens=64) for number in range(count))
    return replace(workload(), requests=asked, heldout=asked[:8])


class Announced(Recorder):
    """Keeps which loads were tried, by trial."""

    def __init__(self):
        super().__init__()
        self.loads = [[]]

    def phase(self, title):
        if title.startswith("Trying"):
            self.loads[-1].append(int(title.split()[1]))

    def trial(self, trial, measurement, *, reused):
        super().trial(trial, measurement, reused=reused)
        self.loads.append([])


def test_a_search_finds_and_tells_which_load_a_goal_holds_at(tuning_on, store):
    budget = Budget(trials=2, finalists=1, confirm_rounds=2)
    reporter = Announced()
    tuning = tuning_on(
        base=BASE,
        plan=PLAN,
        goal=QUICK,
        engine=SimulatedEngine({"simulate-time-scale": 0.02}),
        on=load_of(),
        budget=budget,
        reporter=reporter,
        max_harm=Harm.LOSSLESS,
    )
    assert tuning.study.settings["load_at"] == "boundary"
    decision = tuning.run()
    rows = store.trials(tuning.study)
    stock = rows[0].measurement
    assert stock.status is Status.OK
    assert stock.boundary.unit == "requests in flight"
    assert 2 <= stock.metrics["boundary_low"][0] <= 12
    assert stock.metrics["ttft_p95_s"][0] <= QUICK.slos[0].limit_s
    assert decision.outcome is not Outcome.NOTHING_MEASURED
    assert [said for said in decision.reasons if "requests in flight" in said]
    assert not [said for said in decision.reasons if "misses a limit" in said], (
        "limits are just met at a boundary, so how near they are says nothing against it"
    )
    assert reporter.loads[0][0] == 4, "stock begins where it was told to"
    held = stock.metrics["boundary_low"][0]
    assert reporter.loads[1][0] == held, "the next one where stock reached its limit"
    own = {row.number: row.measurement.metrics.get("boundary_low", (None,))[0] for row in rows}
    confirming = [
        (trial.parent, loads)
        for (trial, _, _), loads in zip(reporter.trials, reporter.loads, strict=False)
        if trial.parent is not None
    ]
    assert confirming
    most = 8 // 2
    assert all(loads[0] == min(own[parent], most) for parent, loads in confirming), (
        "each at its own boundary, as far as the held-out requests go"
    )


def entry(number, low, *, goodput=1.0, harm=Harm.LOSSLESS, rung=RUNG_LOSSLESS, parent=None):
    choice = Choice(policy="p", parameters={}, arguments={"a": number}, harm=harm)
    stack = PolicyStack(choices=(choice,) if number else ())
    metrics = {"ttft_p95_s": (0.05,), "goodput_requests_per_s": (goodput,)}
    if low is not None:
        metrics["boundary_low"] = (low,)
    return Entry(
        Trial(number=number, stack=stack, base_arguments={}, repeats=1, seed=0, parent=parent),
        Measurement(status=Status.OK, metrics=metrics),
        False,
        rung,
    )


@pytest.fixture
def begun(monkeypatch):
    """Where trials begin, and whom they have to beat, after these points."""

    def begin(points, of, *, may_cut=True):
        seen = []

        def run_trial(trial, bench, requests, *, load, **options):
            seen.append(load.keywords)

        monkeypatch.setattr("kvtune.autotune.climb.run_trial", run_trial)
        so_far = SimpleNamespace(
            points=points, contenders=points, goal=QUICK, gates=Gates(points[0].measurement, None)
        )
        Climbs(lambda: so_far, may_cut)(
            of.trial, None, (), canary=False, label="trial", afterwards=None, watch=None
        )
        assert seen[0].pop("may_cut") is may_cut
        return seen[0]

    return begin


STOCK = entry(0, 6.0, rung=RUNG_BASELINE)


def test_stock_begins_at_the_load_of_the_plan(begun):
    assert begun([STOCK], STOCK) == {"start": None, "rival": None}


def test_a_trial_has_to_hold_what_the_best_one_holds(begun):
    found = begun([STOCK, entry(1, 13.0, goodput=3.0), entry(2, 9.0, goodput=2.0)], entry(3, None))
    assert found["start"] == 13.0
    assert (found["rival"].trial, found["rival"].load) == (1, 13.0)


def test_without_early_stop_a_trial_is_measured_at_its_own_boundary(begun):
    points = [STOCK, entry(1, 13.0, goodput=3.0)]
    assert begun(points, entry(3, None), may_cut=False) == {"start": 13.0, "rival": None}


def test_the_first_trial_that_may_change_answers_is_not_given_up(begun):
    points = [STOCK, entry(1, 13.0, goodput=3.0)]
    found = begun(points, entry(3, None, harm=Harm.NEAR_LOSSLESS))
    assert found == {"start": 13.0, "rival": None}


def test_nobody_is_given_up_while_nothing_meets_the_goal(begun):
    late = entry(0, None, rung=RUNG_BASELINE)
    late.measurement.metrics["ttft_p95_s"] = (0.5,)
    assert begun([late], entry(1, None)) == {"start": None, "rival": None}


def test_a_confirmation_begins_at_ones_own_boundary_and_runs_to_its_end(begun):
    points = [STOCK, entry(1, 13.0, goodput=3.0)]
    assert begun(points, entry(9, None, parent=0)) == {"start": 6.0, "rival": None}
    assert begun(points, entry(9, None, parent=1)) == {"start": 13.0, "rival": None}
