"""What a search learns of its baseline's server, on servers that are simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.landscape import Recorder, workload

from kvtune.autotune.limits import Budget
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.types import Harm, Interval, Outcome, StepTimeModel

STEP_S, TOKEN_S = 0.003, 0.0002
BASE = {
    "max-model-len": 512,
    "max-num-seqs": 4,
    "simulate-noise": 0,
    "kv-cache-memory-bytes": 256 << 20,
    "simulate-step-s": STEP_S,
    "simulate-token-s": TOKEN_S,
}
PLAN = LoadPlan(ClosedLoop(4), warmup_requests=0)
PROBED = Budget(trials=1, confirm_rounds=2, probe_s=5.0)
UNPROBED = replace(PROBED, probe_s=0.0)


def part(value):
    return Interval(estimate=value, low=value, high=value, unit="s")


MODEL = StepTimeModel(
    source="probe",
    fixed_s=part(STEP_S),
    per_sequence_s=part(TOKEN_S),
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
            engine=SimulatedEngine(),
            reporter=reporter,
            on=on or workload(tuned=4, heldout=2),
            max_harm=Harm.LOSSLESS,
            **options,
        )
        return tuning, reporter

    return make


def said(reporter, start):
    return [note for note in reporter.notes if note.startswith(start)]


def test_search_probes_its_baseline_and_says_what_that_takes(search, store):
    tuning, reporter = search(budget=PROBED)
    assert tuning.run().outcome is Outcome.KEEP_BASELINE
    (row,) = store.profiles()
    model = row.profile.step_time
    assert model.source == "probe"
    assert model.per_sequence_s.low <= TOKEN_S <= model.per_sequence_s.high
    assert said(reporter, "probing decode steps: at most 5 s")
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


def test_search_without_time_for_a_probe_sends_none(search, store):
    tuning, reporter = search(budget=UNPROBED)
    tuning.run()
    assert not said(reporter, "prob")
    (row,) = store.profiles()
    assert row.profile.step_time is None or row.profile.step_time.source == "load"
