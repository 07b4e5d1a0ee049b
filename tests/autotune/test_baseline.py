"""What a search learns of its baseline's server, on servers that are simulated."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from contracts.decoding import cells
from contracts.landscape import DEVICE, Recorder, run_of, workload
from contracts.store_values import a_profile, some_ceilings

from kvtune.autotune import baseline
from kvtune.autotune.ledger import Entry
from kvtune.autotune.limits import Budget
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadGoal
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE, LoadPlan
from kvtune.profilers.probe import ProbeResult
from kvtune.profilers.step_gaps import join, observations
from kvtune.types import (
    Bottleneck,
    Goal,
    Harm,
    Interval,
    Measurement,
    Outcome,
    PolicyStack,
    Slo,
    Status,
    StepTimeModel,
    Trial,
    Verdict,
)

COSTS = {"fixed_s": 0.04, "per_sequence_s": 0.001, "per_kv_token_s": 3e-6}
CELLS = [(1, 64, 20), (2, 64, 20), (8, 64, 20), (4, 500, 20), (4, 1500, 20)] * 2
BASE = {
    "max-model-len": 512,
    "max-num-seqs": 4,
    "kv-cache-memory-bytes": 256 << 20,
}
PLAN = LoadPlan(ClosedLoop(4), warmup_requests=0)
PROBED = Budget(trials=1, confirm_rounds=2, probe_s=5.0)
UNPROBED = replace(PROBED, probe_s=0.0)


def part(value):
    return Interval(estimate=value, low=value, high=value, unit="s")


MODEL = StepTimeModel(
    source="probe",
    fixed_s=part(0.04),
    per_sequence_s=part(0.001),
    per_kv_token_s=part(1e-6),
    observations=9,
    error_share=0.0,
)


@pytest.fixture
def search(tuning_on):
    def make(base=None, on=None, **options):
        reporter = Recorder()
        tuning = tuning_on(
            base=base or BASE,
            plan=PLAN,
            engine=SimulatedEngine({"simulate-time-scale": 0.1}),
            reporter=reporter,
            on=on or workload(tuned=4, heldout=2),
            max_harm=Harm.LOSSLESS,
            **options,
        )
        return tuning, reporter

    return make


def said(reporter, start):
    return [note for note in reporter.notes if note.startswith(start)]


@pytest.fixture
def probes(monkeypatch):
    """What the probe was asked for; it answers at once with steps whose costs are known."""
    asked = []

    async def probe(endpoint, effective, *, budget_s, should_stop, **options):
        assert should_stop() is None, "the server is still there"
        asked.append((budget_s, options["resets_cache"], options["vocab_size"]))
        seen = [observations(run, blocks=1) for run in cells(CELLS, **COSTS)]
        return ProbeResult(join(seen), len(seen), 9, 100, 50, 3.2, ("a note",))

    monkeypatch.setattr(baseline, "probe", probe)
    return asked


def test_search_probes_its_baseline_and_says_what_that_takes(search, store, probes):
    tuning, reporter = search(budget=PROBED)
    assert tuning.run().outcome is Outcome.KEEP_BASELINE
    assert probes == [(5.0, True, UNKNOWN_VOCAB_SIZE)], "once, and not in the confirmation"
    (row,) = store.profiles()
    assert row.profile.step_time.source == "probe"
    assert row.profile.step_time.fixed_s.estimate == pytest.approx(0.04, rel=1e-3)
    assert row.profile.warnings == ("a note",)
    assert said(reporter, "probing decode steps: at most 5 s")
    assert said(reporter, "the probe took 3 s")


def test_probe_of_a_server_ends_with_it_idle_and_the_search_goes_on(search, store):
    tuning, reporter = search(budget=replace(PROBED, probe_s=0.6))
    assert tuning.run().outcome is Outcome.KEEP_BASELINE
    assert tuning.look.probed.requests > 0
    assert said(reporter, "the probe took")
    assert store.trial(tuning.study, 0).measurement.requests_per_repeat == 4


@pytest.fixture
def probed_before(search, store):
    """A search of another workload whose profile has a model of a probe; it returns the profile."""
    search(budget=UNPROBED, on=workload(tuned=5, heldout=2))[0].run()
    (row,) = store.profiles()
    profile = row.profile.model_copy(update={"step_time": MODEL})
    store.save_profile(profile)
    return profile


@pytest.mark.parametrize(
    ("bottleneck", "said"),
    [(Bottleneck.KV_CAPACITY, "the pool is full"), (Bottleneck.ABSTAIN, "")],
)
def test_only_a_verdict_says_what_a_run_was_bound_by(bottleneck, said, search, monkeypatch):
    verdict = Verdict(
        bottleneck=bottleneck, confidence="low", evidence=(), summary="the pool is full"
    )
    profile = a_profile().model_copy(update={"verdict": verdict})
    monkeypatch.setattr(baseline, "profile_baseline", lambda *args, **options: profile)
    tuning, _ = search()
    trial = Trial(number=1, stack=PolicyStack(), base_arguments={}, repeats=1, seed=0)
    entry = Entry(trial, Measurement(status=Status.OK), reused=False)
    assert tuning.look.bound_by(entry, run_of()) == said


def test_search_uses_what_an_earlier_probe_found(search, store, probed_before):
    tuning, reporter = search(budget=PROBED)
    tuning.run()
    newest = store.profiles()[0].profile
    assert newest.fingerprint != probed_before.fingerprint
    assert newest.step_time == MODEL
    assert not said(reporter, "probing")
    assert said(reporter, "what decode steps cost is known")


def test_what_another_engine_or_load_took_is_no_probe_of_this_one(search, store, probed_before):
    tuning, _ = search(budget=UNPROBED)
    effective = probed_before.effective
    warm = effective.model_copy(update={"start_kind": "warm"})
    assert tuning.look.known_step_time(warm) == MODEL
    for other in ({"kv_cache_dtype": "fp8"}, {"num_gpu_blocks": 7}, {"enforce_eager": True}):
        assert tuning.look.known_step_time(effective.model_copy(update=other)) is None
    assert tuning.look.known_step_time(None) is None
    elsewhere = tuning.device.model_copy(update={"name": "another"})
    assert replace(tuning, device=elsewhere).look.known_step_time(effective) is None
    from_load = MODEL.model_copy(update={"source": "load"})
    known = {"engine": tuning.study.engine.model_copy(update={"version": "0"})}
    for other in ({"step_time": from_load}, known):
        only = effective.model_copy(update={"kv_cache_size_tokens": 1})
        store.save_profile(probed_before.model_copy(update={**other, "effective": only}))
        assert tuning.look.known_step_time(only) is None


def test_server_on_which_batches_cannot_vary_is_not_probed(search, store):
    tuning, reporter = search(budget=PROBED, base={**BASE, "max-num-seqs": 1})
    tuning.run()
    assert said(reporter, "decode steps are not probed: only 1 sequences fit")
    assert len(store.profiles()) == 1


@pytest.mark.parametrize(("time_s", "limit_s"), [(None, 20.0), (1000.0, 20.0), (60.0, 6.0)])
def test_probe_takes_a_tenth_of_the_time_at_most(time_s, limit_s):
    assert Budget(trials=5, time_s=time_s, probe_s=20.0).probe_limit_s == limit_s


def test_interrupt_of_a_probe_ends_it_and_the_search_and_keeps_the_baseline(search, store):
    tuning, reporter = search(budget=replace(PROBED, probe_s=60.0))
    came = []

    def interrupt_the_probe(progress):
        if said(reporter, "probing decode steps") and not came:
            came.append(signal.raise_signal(signal.SIGINT))

    reporter.load = interrupt_the_probe
    tuning.run()
    assert tuning.interrupted
    assert any("it was interrupted" in note for note in tuning.look.probed.notes)
    assert store.trial(tuning.study, 0).measurement.failure is None
    onward, reporter = search(budget=PROBED)
    onward.run()
    assert not onward.interrupted
    assert [entry.reused for entry in onward.ledger.entries if not entry.trial.number] == [True]


def test_search_without_time_for_a_probe_sends_none_and_going_on_has_no_server_for_one(
    search, store, monkeypatch
):
    def measure(device):
        raise AssertionError("the simulated engine only pretends to compute")

    monkeypatch.setattr("kvtune.autotune.profiling.measure_ceilings", measure)
    tuning, reporter = search(budget=UNPROBED)
    tuning.run()
    assert not said(reporter, "prob")
    (row,) = store.profiles()
    assert row.profile.step_time is None or row.profile.step_time.source == "load"
    assert store.ceilings(DEVICE.key) is None
    onward, reporter = search(budget=PROBED)
    onward.run()
    assert onward.look.probed is None
    assert said(reporter, "decode steps are not probed: the defaults were measured before")


def test_baseline_that_has_no_value_of_the_goal_is_not_probed(search, probes, store):
    load = workload(tuned=4, heldout=2)
    one_token = tuple(replace(request, output_tokens=1) for request in load.requests)
    goal = Goal(slos=(Slo(metric="itl", statistic="p95", limit_s=1.0),))
    tuning, _ = search(budget=PROBED, on=replace(load, requests=one_token), goal=goal)
    with pytest.raises(BadGoal, match="p95 itl <= 1s cannot be measured"):
        tuning.run()
    assert probes == []
    assert store.trial(tuning.study, 0).measurement.metrics["ttft_p95_s"]


class Computing(SimulatedEngine):
    """An engine that says that it computes; a landscape serves in its place."""

    def describe(self):
        return super().describe().model_copy(update={"platform": "cpu"})


def test_search_measures_what_its_device_reaches_before_it_is_served(
    tuning_on, landscape, store, monkeypatch
):
    served = []

    def measure(device):
        served.append(len(landscape.asked))
        return some_ceilings(device)

    monkeypatch.setattr("kvtune.autotune.profiling.measure_ceilings", measure)
    budget = Budget(trials=1, confirm_rounds=2)
    tuning_on(engine=Computing(), budget=budget).run()
    assert served == [0]
    (row,) = store.profiles()
    assert row.profile.ceilings == some_ceilings(DEVICE)
    tuning_on(engine=Computing(), budget=budget, seed=1).run()
    assert served == [0], "it is known then"
