"""Whole searches on simulated servers: real processes, real load, real faults."""

import signal
from dataclasses import replace

import psutil
import pytest
from contracts.landscape import Recorder, workload

from kvtune.autotune.limits import Budget, QualityRules
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.engines.vllm.server import VllmServer
from kvtune.errors import StoreError
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.quality.suite import Item, QualityMetric, Size, Suite
from kvtune.types import FailureClass, Goal, Harm, Outcome, Slo, Status

pytestmark = pytest.mark.integration

FAST = {"simulate-time-scale": 0.01}
BASE = {
    "max-model-len": 2048,
    "kv-cache-memory-bytes": 64 << 20,
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256",
    "max-num-seqs": 8,
    "max-num-active-seqs": 8,
    "max-num-batched-tokens": 512,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.0,
}
PLAN = LoadPlan(ClosedLoop(4), warmup_requests=2)
IMPOSSIBLE = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1e-6),))
SMALL = Budget(trials=2, finalists=1, confirm_rounds=2)


class Faulty(SimulatedEngine):
    """Gives servers more arguments, chosen by those that they are started with."""

    def __init__(self, more):
        super().__init__(FAST)
        self._more = more
        self.pids = []

    def launch(self, spec, **options):
        arguments = {**spec.arguments, **self._more(spec.arguments)}
        server = super().launch(replace(spec, arguments=arguments), **options)
        self.pids.append(server.endpoint.pid)
        return server


@pytest.fixture
def search(tuning_on):
    def make(more=lambda arguments: {}, **options):
        engine = Faulty(more)
        return engine, tuning_on(**{"base": BASE, "plan": PLAN, "engine": engine, **options})

    return make


def test_a_search_ends_with_a_decision_and_leaves_no_server(search, store):
    engine, tuning = search(budget=SMALL, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    assert decision.outcome is not Outcome.NOTHING_MEASURED
    assert len(engine.pids) == 2 + 2 * 2
    assert not [pid for pid in engine.pids if psutil.pid_exists(pid)]
    effective = [row.measurement.effective for row in store.trials(tuning.study)]
    sizes = [row.trial.stack.arguments.get("block-size", 128) for row in store.trials(tuning.study)]
    assert [one.block_size_tokens for one in effective] == sizes
    assert store.profiles(), "the baseline is profiled on the way"


def test_a_configuration_that_crashes_under_load_never_wins(search, store):
    def crash(arguments):
        return {"simulate-crash-after-requests": 5} if "block-size" in arguments else {}

    _, tuning = search(crash, budget=SMALL, max_harm=Harm.LOSSLESS)
    decision = tuning.run()
    crashed = store.trial(tuning.study, 1).measurement
    assert crashed.status is Status.FAILED
    assert crashed.failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert "simulated crash" in crashed.failure.log_excerpt
    assert decision.recommended == 0
    assert decision.rejected[1].startswith("crash-under-load: ")


def test_fp8_that_answers_garbage_never_wins(search, store):
    def garble(arguments):
        return {"simulate-broken-output": True} if "kv-cache-dtype" in arguments else {}

    base = {**BASE, "block-size": 32, "max-model-len": 2560}
    _, tuning = search(garble, base=base, goal=IMPOSSIBLE, explore_lossy=True, budget=SMALL)
    decision = tuning.run()
    harmful = [
        row.number
        for row in store.trials(tuning.study)
        if row.trial.stack.harm is not Harm.LOSSLESS
    ]
    assert harmful
    assert decision.recommended == 0
    for number in harmful:
        assert "the baseline found '7194' in a long prompt" in decision.rejected[number]


class Codes(Suite):
    """Items that the simulated model answers, for it goes on as the text did before."""

    name, says = "codes", "what stands in the prompt is not found"
    metrics = (QualityMetric("found", "share", "higher", "difference", 0.05),)

    def items(self, plan):
        count = 20 if plan.size is Size.SCREEN else 150
        text = "The code of door {0} is {0}11. The code of door {0} is"
        return tuple(Item(f"{n}", "doors", prompt=text.format(n)) for n in range(10, 10 + count))

    def figures(self, item, ours, theirs):
        return {"found": tuple(float(item.key in (a.texts or ("",))[0]) for a in (ours, theirs))}


@pytest.fixture
def asks_codes(monkeypatch):
    monkeypatch.setattr("kvtune.autotune.quality.trials.asked_suites", lambda: (Codes(),))


ASKED = {
    "base": {**BASE, "block-size": 128, "max-model-len": 2560},
    "explore_lossy": True,
    "budget": Budget(trials=2, finalists=1, confirm_rounds=2),
    "quality": QualityRules(),
}
"""A search that can try nothing but 8-bit KV."""


def test_servers_are_asked_after_their_load_and_judged(search, store, asks_codes):
    def garble(arguments):
        return {"simulate-broken-output": True} if "kv-cache-dtype" in arguments else {}

    engine, tuning = search(garble, **ASKED)
    decision = tuning.run()
    assert decision.recommended == 0
    (row,) = store.quality_reports(tuning.study)
    assert (row.trial, row.report.outcome) == (1, "fail")
    (figure,) = [one for one in row.report.figures if one.category == "doors"]
    assert (figure.baseline, figure.candidate, figure.items) == (1.0, 0.0, 20)
    assert figure.floor.estimate == 0.0
    assert len(engine.pids) == 2, "two trials: none for questions, nor for the defaults alone"
    measured = [store.trial(tuning.study, number).measurement for number in (0, 1)]
    assert all(0 < one.asked_s < one.wall_s for one in measured)


def test_a_server_that_crashes_while_it_is_asked_keeps_its_figures_and_is_out(
    search, store, asks_codes
):
    def crash(arguments):
        # Eight requests, two to warm up, three of the canary: the crash comes with the questions.
        return {"simulate-crash-after-requests": 18} if "kv-cache-dtype" in arguments else {}

    engine, tuning = search(crash, **ASKED)
    decision = tuning.run()
    measurement = store.trial(tuning.study, 1).measurement
    assert measurement.status is Status.OK
    assert measurement.metrics
    assert measurement.asked_s > 0
    assert decision.rejected[1].startswith(
        "while it was asked the questions of quality, after its load: crash-under-load: "
    )
    assert store.records(tuning.study, 1), "the load itself was measured"
    assert not [pid for pid in engine.pids if psutil.pid_exists(pid)]


def test_an_interrupt_in_the_middle_of_a_replay_is_gone_on_from(search, store):
    class Impatient(Recorder):
        trials_begun = 0

        def phase(self, title):
            self.trials_begun += 1

        def load(self, progress):
            if self.trials_begun == 2:
                raise KeyboardInterrupt

    engine, tuning = search(budget=SMALL, reporter=Impatient(), max_harm=Harm.LOSSLESS)
    tuning.run()
    assert tuning.interrupted
    assert not [pid for pid in engine.pids if psutil.pid_exists(pid)]
    rows = store.trials(tuning.study)
    assert [row.measurement.status for row in rows] == [Status.OK, Status.STOPPED]
    onward, again = search(budget=SMALL, max_harm=Harm.LOSSLESS)
    again.run()
    assert len(onward.pids) == 1 + 2 * 2, "the defaults are not measured again"
    assert store.trial(again.study, 1).trial == rows[1].trial


def test_an_interrupt_while_a_server_stops_costs_no_measurement(search, store, monkeypatch):
    stop = VllmServer.stop

    def interrupted_stop(server):
        stop(server)
        signal.raise_signal(signal.SIGINT)

    engine, tuning = search(budget=SMALL, max_harm=Harm.LOSSLESS)
    with monkeypatch.context() as patch:
        patch.setattr(VllmServer, "stop", interrupted_stop)
        decision = tuning.run()
    assert tuning.interrupted
    (row,) = store.trials(tuning.study)
    assert row.measurement.status is Status.OK
    assert decision.recommended == 0, "the decision knows of it too"
    assert [one for one in engine.pids if psutil.pid_exists(one)] == []

    _, onward = search(budget=SMALL, max_harm=Harm.LOSSLESS)
    onward.run()
    reused = {trial.number: reused for trial, _, reused in onward.reporter.trials}
    assert reused[0]


def test_a_canary_that_is_never_answered_is_a_hang(search, store):
    plan = LoadPlan(ClosedLoop(4), warmup_requests=0, stall_timeout_s=0.5)
    hangs = {"simulate-hang-after-requests": 0}
    engine, tuning = search(lambda arguments: hangs, budget=Budget(trials=1), plan=plan)
    tuning.run()
    (row,) = store.trials(tuning.study)
    assert row.measurement.failure.failure is FailureClass.HANG_UNDER_LOAD
    assert "the server sent nothing for 0.5 s" in row.measurement.failure.message
    assert [one for one in engine.pids if psutil.pid_exists(one)] == []


def test_a_log_that_cannot_be_written_ends_the_search_and_blames_no_trial(search, store, tmp_path):
    _, tuning = search(budget=SMALL)
    (tmp_path / "logs" / "trial-0.log").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"trial-0\.log cannot be written: Is a directory"):
        tuning.run()
    (row,) = store.trials(tuning.study)
    assert row.measurement.status is Status.STOPPED


def test_requests_with_arrival_times_are_replayed_in_their_time(search):
    timed = tuple(
        replace(request, arrival_s=number / 50)
        for number, request in enumerate((*workload().requests, *workload().heldout))
    )
    load = replace(workload(), requests=timed[:8], heldout=timed[:4])
    budget = replace(SMALL, trials=1)
    _, tuning = search(on=load, plan=LoadPlan(OpenLoop(), warmup_requests=0), budget=budget)
    decision = tuning.run()
    assert decision.outcome in (Outcome.KEEP_BASELINE, Outcome.NO_CLEAR_WINNER, Outcome.WINNER)
    assert decision.figures["requests_per_s"].estimate == pytest.approx(4 / 0.06, rel=0.4)
    (run,) = tuning.ledger.runs(tuning.ledger.entries[0].trial, tuning.tuning_set, canary=True)
    assert [record.scheduled_s for record in run.records] == pytest.approx(
        [number / 50 for number in range(8)], abs=0.01
    )
