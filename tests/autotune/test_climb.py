"""A trial at its own boundary: which loads its server is put under, and what is kept of them."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from contracts.landscape import GOAL, Recorder, requests

from kvtune.autotune.climb import Rival, climb
from kvtune.autotune.confirm import merged
from kvtune.autotune.words import boundary_text
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import (
    Failure,
    FailureClass,
    Goal,
    LoadRun,
    Measurement,
    Request,
    RequestRecord,
    Slo,
    Status,
)

PLAN = LoadPlan(ClosedLoop(16), at_boundary=True)
LATE = "timeout: not complete after 300 s"


def run_of(count, ttft_s, error=None):
    records = tuple(
        RequestRecord(
            index, 0.0, 0.0, None if error else ttft_s, ttft_s + 1, (0.1,), 24, 2, 2, error=error
        )
        for index in range(count)
    )
    return LoadRun(records, 10.0, 0.0, {}, {})


@dataclass
class Pretended:
    """Replays on a server by formula: `ttft_s(load)`, or a failure in place of a number."""

    ttft_s: callable
    plan: LoadPlan = PLAN
    goal: Goal = GOAL
    repeats: int = 1
    dies: bool = False
    count: int = 0
    sent: list = field(default_factory=list)

    def __post_init__(self):
        self.trial = SimpleNamespace(repeats=self.repeats)
        self.bench = SimpleNamespace(plan=self.plan, goal=self.goal, reporter=Recorder())
        died = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it died")
        self.server = SimpleNamespace(failure=lambda: died if self.dies else None)

    def replay(self, requests, plan, watch=None):
        self.count += 1
        load = getattr(plan.arrivals, "concurrency", None)
        if load is None:
            times_s = [request.arrival_s for request in requests]
            load = (len(times_s) - 1) / (times_s[-1] - times_s[0]) / plan.arrivals.time_scale
        self.sent.append((load, len(requests), plan.warmup_requests))
        found = self.ttft_s(load)
        if isinstance(found, FailureClass):
            why = Failure(failure=found, message="requests failed")
            return run_of(len(requests), 9.0, error=LATE), why
        run = run_of(len(requests), found)
        for ended, record in enumerate(run.records if watch else (), 1):
            watch.saw(record)
            if reason := watch.verdict(1.0):
                return replace(run, records=run.records[:ended], cut=reason), None
        return run, None

    def climb(self, load=None, **options):
        return climb(self, load or requests(96), None, **options)

    @property
    def loads(self):
        return [load for load, _, _ in self.sent]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("kvtune.autotune.replays.DYING_S", 0.0)


def queueing(limit):
    """The first token takes longer with every request in flight: a second at `limit` of them."""
    return lambda load: load / limit


def measured(loaded):
    return Measurement(status=Status.OK, metrics=dict(loaded.metrics), **loaded.known)


def test_a_trial_is_measured_at_the_highest_load_that_holds():
    server = Pretended(queueing(13.5))
    loaded = server.climb()
    assert server.loads == [16, 15, 10, 12, 13]
    assert loaded.failure is None
    assert loaded.metrics["boundary_low"] == (13.0,)
    assert loaded.metrics["boundary_high"] == (15.0,)
    assert loaded.metrics["boundary_load"][0] == pytest.approx(13.5, rel=0.01)
    (run,) = loaded.runs
    assert len(run.records) == 39
    assert run.records[0].first_token_s == pytest.approx(13 / 13.5)
    boundary = loaded.known["boundary"]
    assert [level.load for level in boundary.levels] == server.loads
    assert [level.held for level in boundary.levels] == [False, False, True, True, True]
    assert {level.worst for level in boundary.levels} == {"p95 ttft <= 1s"}
    assert boundary_text(measured(loaded)) == (
        "holds up to 13 requests in flight (13 to 15); what limits it is p95 ttft <= 1s"
    )


def test_only_the_first_load_is_warmed_up_for():
    server = Pretended(queueing(13.5))
    server.climb()
    assert [warmup for _, _, warmup in server.sent] == [4, 0, 0, 0, 0]


def test_a_load_above_one_that_held_ends_once_it_surely_does_not_hold(monkeypatch):
    ended = {}
    replay = Pretended.replay

    def noted(server, requests, plan, watch=None):
        run, failure = replay(server, requests, plan, watch)
        ended[plan.arrivals.concurrency] = (len(run.records), run.cut)
        return run, failure

    monkeypatch.setattr(Pretended, "replay", noted)
    found = Pretended(queueing(13.5)).climb(start=10.0)
    said = "p95 ttft <= 1s is missed whatever becomes of the rest"
    assert ended == {10: (30, ""), 12: (36, ""), 19: (4, said), 15: (4, said), 13: (39, "")}
    assert found.metrics["boundary_high"] == (15.0,)
    ended.clear()
    Pretended(queueing(13.5)).climb()
    assert ended[16] == (48, ""), "no load held before: it may be the one that is shown"
    ended.clear()
    Pretended(queueing(13.5)).climb(start=10.0, may_cut=False)
    assert ended[19] == (57, "")
    ended.clear()
    Pretended(queueing(13.5), repeats=2).climb(start=10.0)
    assert ended[19] == (57, ""), "another repeat may make up for it"


def test_a_load_during_which_the_machine_changed_is_tried_once_more(monkeypatch):
    said = iter(["the machine became 30% slower"])
    monkeypatch.setattr("kvtune.profilers.drift.drift_warning", lambda records: next(said, None))
    slow_at_first = iter([1.2])
    server = Pretended(lambda load: next(slow_at_first, load / 20.0))
    loaded = server.climb()
    assert server.loads[:3] == [16, 16, 19], "the second time it held"
    assert loaded.metrics["boundary_low"] == (19.0,)
    assert server.bench.reporter.notes == [
        "the machine became 30% slower; the load is replayed once more"
    ]


def test_every_load_is_announced():
    server = Pretended(queueing(1.5))
    phases = []
    server.bench.reporter.phase = phases.append
    server.climb()
    assert phases[0] == "Trying 16 requests in flight"
    assert "Trying 1 request in flight" in phases


def test_a_trial_that_holds_what_the_best_does_goes_up_in_growing_steps():
    server = Pretended(queueing(40.0))
    loaded = server.climb(start=12.0, rival=Rival(0, 12.0))
    assert server.loads[:4] == [12, 15, 24, 48]
    assert loaded.metrics["boundary_low"][0] <= 40 < loaded.metrics["boundary_high"][0]


def test_a_trial_that_holds_a_step_less_than_the_best_is_not_measured_further():
    server = Pretended(queueing(11.0))
    loaded = server.climb(start=12.0, rival=Rival(3, 12.0))
    assert server.loads == [12, 10]
    assert "status" not in loaded.known
    assert loaded.metrics["boundary_low"] == (10.0,)


def test_a_trial_that_holds_less_than_that_is_cut():
    server = Pretended(queueing(4.0))
    loaded = server.climb(start=12.0, rival=Rival(3, 12.0))
    assert server.loads == [12, 10]
    assert loaded.known["status"] is Status.CUT
    assert loaded.known["share"] == pytest.approx(10 / 12)
    assert loaded.known["cut"] == (
        "holds less than 10 requests in flight, and trial 3 holds 12 requests in flight"
    )
    assert "boundary_low" not in loaded.metrics
    assert loaded.runs[0].records[0].first_token_s == pytest.approx(10 / 4), "of the lower one"


def test_a_goal_that_one_request_alone_misses_is_told_as_such():
    server = Pretended(lambda load: 1.2 + load)
    loaded = server.climb()
    assert server.loads[-1] == 1
    assert "status" not in loaded.known, "it was measured; it misses the goal"
    assert loaded.metrics["boundary_high"] == (1.0,)
    assert boundary_text(measured(loaded)) == (
        "does not hold even 1 request in flight; what limits it is p95 ttft <= 1s"
    )


def test_a_goal_that_one_request_alone_misses_is_no_question_of_the_best():
    loaded = Pretended(lambda load: 1.2 + load).climb(start=1.0, rival=Rival(3, 1.0))
    assert "status" not in loaded.known
    assert loaded.metrics["boundary_high"] == (1.0,)


def test_rounds_of_a_confirmation_are_told_together():
    first = measured(Pretended(queueing(13.9)).climb())
    second = measured(Pretended(queueing(12.5)).climb())
    assert boundary_text(merged([first, second])) == (
        "holds up to 13 requests in flight (12 to 15); what limits it is p95 ttft <= 1s"
    )
    never = measured(Pretended(lambda load: 1.2 + load).climb())
    assert boundary_text(merged([first, never])) == (
        "holds no load in every round; what limits it is p95 ttft <= 1s"
    )


def test_a_workload_with_too_few_requests_shows_no_upper_end():
    server = Pretended(queueing(500.0))
    loaded = server.climb(requests(40))
    assert server.loads[-1] == 20
    assert "boundary_high" not in loaded.metrics
    assert boundary_text(measured(loaded)) == (
        "holds at least 20 requests in flight: the workload has too few requests to show more"
    )


def test_a_cliff_is_told():
    server = Pretended(lambda load: 0.2 if load <= 13 else 9.0)
    loaded = server.climb()
    assert loaded.known["boundary"].is_cliff
    assert boundary_text(measured(loaded)).endswith("a cliff: between them it more than doubles")


def test_rates_have_a_boundary_too():
    plan = LoadPlan(OpenLoop(), at_boundary=True)
    load = [Request(input_tokens=8, output_tokens=2, arrival_s=n / 2) for n in range(60)]
    server = Pretended(lambda rate: 0.5 if rate < 3.1 else 1.5, plan=plan)
    loaded = server.climb(load)
    low, high = loaded.metrics["boundary_low"][0], loaded.metrics["boundary_high"][0]
    assert low < 3.1 <= high
    assert high / low < 1.13
    assert "requests a second (" in boundary_text(measured(loaded))


def test_requests_that_time_out_are_a_load_that_is_too_high():
    server = Pretended(lambda load: 0.5 if load <= 6 else FailureClass.REQUEST_ERRORS)
    loaded = server.climb()
    assert loaded.failure is None
    assert loaded.metrics["boundary_low"] == (6.0,)
    assert loaded.metrics["boundary_load"] == (6.0,)
    assert None in {level.violation for level in loaded.known["boundary"].levels}


def test_requests_that_time_out_at_every_load_are_a_failure():
    server = Pretended(lambda load: FailureClass.REQUEST_ERRORS)
    assert server.climb().failure.failure is FailureClass.REQUEST_ERRORS
    assert server.loads[-1] == 1


@pytest.mark.parametrize(
    "failure", [FailureClass.HANG_UNDER_LOAD, FailureClass.CONTAMINATED, FailureClass.UNKNOWN]
)
def test_any_other_failure_ends_the_trial_at_whatever_load(failure):
    server = Pretended(lambda load: 0.5 if load <= 6 else failure)
    loaded = server.climb()
    assert loaded.failure.failure is failure
    assert loaded.runs == ()
    assert server.loads == [16]


def test_a_server_that_died_is_no_load_that_was_too_high():
    server = Pretended(lambda load: FailureClass.REQUEST_ERRORS, dies=True)
    server.climb()
    assert server.loads == [16]


def test_every_load_is_replayed_as_often_as_the_trial_has_repeats():
    server = Pretended(queueing(13.5), repeats=2)
    loaded = server.climb()
    assert server.loads == [16, 16, 15, 15, 10, 10, 12, 12, 13, 13]
    assert len(loaded.runs) == 2
    assert loaded.metrics["boundary_low"] == (13.0,)


def test_what_limits_a_load_is_the_limit_that_is_missed_most():
    goal = Goal(slos=(*GOAL.slos, Slo(metric="e2e", statistic="p50", limit_s=1.4)))
    loaded = Pretended(queueing(20.0), goal=goal).climb()
    levels = sorted(loaded.known["boundary"].levels, key=lambda level: level.load)
    assert {level.worst for level in levels if not level.held} == {"p50 e2e <= 1.4s"}
