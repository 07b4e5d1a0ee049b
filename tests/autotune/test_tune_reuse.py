"""Whole searches that change a running server for trials, on simulated ones: real processes."""

import signal

import psutil
import pytest
from contracts.landscape import Recorder

from kvtune.autotune.limits import Budget, Sampler
from kvtune.autotune.reuse import ServerPool
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Harm, Status

pytestmark = pytest.mark.integration

BASE = {
    "max-model-len": 2048,
    "kv-cache-memory-bytes": 64 << 20,
    "block-size": 32,
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256",
    "max-num-batched-tokens": 512,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.0,
}
"""All that is left to try is how many requests run at once."""


class Starts(SimulatedEngine):
    """Remembers the servers that it started, and what it was told about them."""

    def __init__(self):
        super().__init__({"simulate-time-scale": 0.01})
        self.specs = []
        self.pids = []

    def launch(self, spec, **options):
        self.specs.append(spec)
        server = super().launch(spec, **options)
        self.pids.append(server.endpoint.pid)
        return server


@pytest.fixture
def engine():
    with Starts() as made:
        yield made
    assert not [pid for pid in made.pids if psutil.pid_exists(pid)], "a server was left behind"


@pytest.fixture
def searched(engine, tuning_on, store):
    """Run a search on a pool; return the decision and the stored trials."""

    def run(reuse=True, **options):
        with ServerPool(engine, reuse=reuse) as pool:
            tuning = tuning_on(
                base=BASE,
                plan=LoadPlan(ClosedLoop(8), warmup_requests=2),
                engine=pool,
                budget=Budget(trials=4, finalists=1, confirm_rounds=2),
                max_harm=Harm.LOSSLESS,
                early_stop=False,
                sampler=Sampler.TPE,
                **options,
            )
            decision = tuning.run()
        return decision, store.trials(tuning.study)

    return run


def kinds(rows, *, confirmed):
    return [
        row.measurement.effective.start_kind
        for row in rows
        if (row.trial.parent is not None) == confirmed
    ]


def test_trials_share_a_server_and_confirmations_have_their_own(searched, engine):
    decision, rows = searched()
    assert kinds(rows, confirmed=False) == ["cold", "live", "live", "live"]
    assert set(kinds(rows, confirmed=True)) == {"cold"}
    assert [spec.reusable for spec in engine.specs] == [True, *[False] * (len(engine.specs) - 1)]
    for row in rows:
        asked = row.trial.stack.arguments.get("max-num-seqs", 128)
        assert row.measurement.effective.max_num_seqs == asked
        assert row.measurement.status is Status.OK
    assert decision.recommended is not None


def test_without_reuse_every_trial_has_a_server_of_its_own(searched, engine):
    _, rows = searched(reuse=False)
    assert {row.measurement.effective.start_kind for row in rows} == {"cold"}
    assert len(engine.pids) == len(rows)
    started = len(engine.pids)
    searched()
    assert len(engine.pids) == started, "what was measured either way is known"


class Acting(Recorder):
    """Does something once, when the second trial has its server."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.servers = 0

    def ready(self, start_s):
        super().ready(start_s)
        self.servers += 1
        if self.servers == 2 and self.act is not None:
            act, self.act = self.act, None
            act()


def test_a_server_that_dies_under_a_trial_fails_that_one_and_no_other(searched, engine):
    _, rows = searched(reporter=Acting(lambda: psutil.Process(engine.pids[-1]).kill()))
    trials = [row.measurement for row in rows if row.trial.parent is None]
    assert [one.status is Status.OK for one in trials] == [True, False, True, True]
    assert trials[1].effective.start_kind == "live"
    used = [spec for spec in engine.specs if spec.reusable]
    assert len(used) == 2, "the dead one is replaced, once"


def test_an_interrupt_under_a_changed_server_ends_it(searched, engine):
    interrupt = Acting(lambda: signal.raise_signal(signal.SIGINT))
    _, rows = searched(reporter=interrupt)
    assert interrupt.act is None
    assert [row.measurement.status for row in rows] == [Status.OK, Status.STOPPED]
    assert len(engine.pids) == 1
