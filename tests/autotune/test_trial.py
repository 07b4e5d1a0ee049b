"""One trial on real simulated servers: every way they fail has a class, and none is left behind."""

import asyncio
import json

import psutil
import pytest
from contracts.landscape import GOAL, Recorder, requests

from kvtune.autotune.decide import meets_goal, objective_values
from kvtune.autotune.fidelity import Race, pace_of
from kvtune.autotune.replays import salt_of
from kvtune.autotune.trial import Bench, run_trial
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.quality.traffic import objection
from kvtune.profilers.scrape import Scraper
from kvtune.types import (
    Choice,
    FailureClass,
    Harm,
    PolicyStack,
    Request,
    Status,
    Trial,
)

FAST = {"simulate-time-scale": 0.01}


class WatchedEngine(SimulatedEngine):
    """Remembers the servers that it started."""

    def __init__(self):
        super().__init__(FAST)
        self.pids = []
        self.specs = []

    def launch(self, spec, **options):
        self.specs.append(spec)
        server = super().launch(spec, **options)
        self.pids.append(server.endpoint.pid)
        return server


@pytest.fixture
def engine():
    with WatchedEngine() as made:
        yield made
    assert not [pid for pid in made.pids if psutil.pid_exists(pid)], "a server was left behind"


def trial_of(repeats=1, number=0, **arguments):
    choice = Choice(policy="p", parameters={}, arguments=arguments, harm=Harm.LOSSLESS)
    stack = PolicyStack(choices=(choice,)) if arguments else PolicyStack()
    base = {"max-model-len": 2048, "kv-cache-memory-bytes": 64 << 20}
    return Trial(number=number, stack=stack, base_arguments=base, repeats=repeats, seed=0)


@pytest.fixture
def measured(engine, tmp_path, monkeypatch):
    """Run a trial with these engine arguments."""
    monkeypatch.setattr("kvtune.autotune.replays.DYING_S", 0.5)

    def run(
        load=None,
        canary=False,
        plan=None,
        reporter=None,
        repeats=1,
        start_timeout_s=120,
        model="org/model",
        afterwards=None,
        watch=None,
        **options,
    ):
        bench = Bench(
            engine=engine,
            model=model,
            served_model_name="chat",
            environment={"KVTUNE_TEST": "1"},
            plan=plan or LoadPlan(ClosedLoop(4), warmup_requests=2),
            goal=GOAL,
            log_dir=tmp_path,
            reporter=reporter or Recorder(),
            start_timeout_s=start_timeout_s,
        )
        arguments = {name.replace("_", "-"): value for name, value in options.items()}
        return run_trial(
            trial_of(repeats, **arguments),
            bench,
            load or requests(8),
            canary=canary,
            afterwards=afterwards,
            watch=watch,
        )

    return run


def test_a_trial_gives_figures_of_every_repeat_and_what_the_engine_ran(measured, engine, tmp_path):
    measurement, runs = measured(repeats=2, block_size=32)
    assert measurement.status is Status.OK
    assert len(runs) == 2
    assert all(len(run.records) == 8 for run in runs)
    assert all(len(values) == 2 for values in measurement.metrics.values())
    assert measurement.metrics["goodput_requests_per_s"][0] > 0
    assert measurement.requests_per_repeat == 8
    assert measurement.effective.block_size_tokens == 32
    assert measurement.effective.kv_cache_memory_bytes == 64 << 20
    assert measurement.kv_bytes_per_token_observed == pytest.approx(23_040, rel=0.02)
    assert measurement.cache == "cold"
    assert measurement.wall_s > measurement.start_s > 0
    assert set(measurement.versions) == {"kvtune", "python", "engine"}
    assert measurement.canary_answers is None
    assert measurement.warnings == ()
    assert [counters["vllm:generation_tokens_total"] for counters in measurement.counters] == [
        32.0,
        32.0,
    ], "eight requests of four tokens, without the warm-up"
    assert engine.specs[0].model_name == "chat"
    assert engine.specs[0].environment == {"KVTUNE_TEST": "1"}
    assert "Application startup complete" in (tmp_path / "trial-0.log").read_text()


def test_the_second_repeat_finds_nothing_of_the_first_in_the_prefix_cache(measured):
    load = [
        Request(input_tokens=512, output_tokens=2, prefix_blocks=(1, 2), prefix_block_tokens=256)
    ]
    measurement, _ = measured(load=load * 3, repeats=2, plan=LoadPlan(ClosedLoop(1)))
    for counters in measurement.counters:
        hits = counters["vllm:prefix_cache_hits_total"]
        assert hits == 2 * 384, "two of three requests find all but the last block, every time"


def test_requests_are_sent_at_the_times_of_the_workload(measured):
    load = [Request(input_tokens=16, output_tokens=2, arrival_s=number / 10) for number in range(4)]
    _, (run,) = measured(load=load, plan=LoadPlan(OpenLoop(time_scale=0.5), warmup_requests=0))
    sent_s = [record.scheduled_s for record in run.records]
    assert sent_s == pytest.approx([0.0, 0.05, 0.1, 0.15], abs=0.01)


def test_the_canary_is_asked_where_it_is_wanted(measured):
    measurement, _ = measured(canary=True)
    assert "7194" in measurement.canary_answers[0]
    broken, _ = measured(canary=True, simulate_broken_output=True)
    assert "7194" not in broken.canary_answers[0]
    assert broken.status is Status.OK, "the canary does not judge; whoever compares does"


def test_a_trial_that_answers_garbage_to_long_prompts_is_objected_to(measured):
    story = "The ships lay in the harbour, and the people sat by the fire until it was morning. "
    load = [
        Request(prompt=f"Chapter {number}. {story * 20}Then came", output_tokens=16)
        for number in range(12)
    ]
    baseline, runs = measured(load=load, repeats=2)
    assert (baseline.outputs.answers, baseline.outputs.long_prompts) == (12, 12)
    assert baseline.outputs.broken == 0
    assert {record.text for run in runs for record in run.records} == {None}
    broken, _ = measured(load=load, kv_cache_dtype="nvfp4")
    assert broken.outputs.looping == 12
    assert "12 of 12 answers" in objection(broken, baseline)
    fine, _ = measured(load=load, kv_cache_dtype="fp8")
    assert objection(fine, baseline) is None
    short = [Request(prompt=f"Chapter {number}.", output_tokens=16) for number in range(12)]
    hidden, _ = measured(load=short, kv_cache_dtype="nvfp4")
    assert (hidden.outputs.broken, hidden.outputs.long_prompts) == (0, 0)


@pytest.mark.parametrize(
    ("options", "failure", "excerpt"),
    [
        ({"kv_cache_memory_bytes": 32 << 20}, FailureClass.DOES_NOT_FIT, "To serve at least one"),
        ({"no_such_option": 1}, FailureClass.BAD_ARGUMENT, "unrecognized arguments"),
        ({"block_size": 17}, FailureClass.BAD_ARGUMENT, "No common block size"),
        ({"simulate_wrong_model": True}, FailureClass.WRONG_MODEL, ""),
        (
            {"simulate_crash_after_requests": 4},
            FailureClass.CRASH_UNDER_LOAD,
            "simulated crash after 4 requests",
        ),
        ({"simulate_garbage_after": 4}, FailureClass.REQUEST_ERRORS, ""),
        ({"simulate_error_rate": 1.0}, FailureClass.REQUEST_ERRORS, ""),
    ],
)
def test_a_failure_has_a_class_and_no_figure(options, failure, excerpt, measured):
    measurement, _ = measured(**options)
    assert measurement.status is Status.FAILED
    assert measurement.failure.failure is failure
    assert measurement.failure.message
    assert excerpt in measurement.failure.log_excerpt
    assert measurement.metrics == {}
    assert measurement.wall_s > 0


def test_a_server_that_never_gets_ready_is_a_hang(measured):
    measurement, _ = measured(simulate_never_ready=True, start_timeout_s=1.0)
    assert measurement.failure.failure is FailureClass.HANG_AT_START


def test_a_server_that_falls_silent_under_load_is_a_failure(measured, monkeypatch):
    monkeypatch.setitem(Scraper.__init__.__kwdefaults__, "timeout_s", 0.2)
    plan = LoadPlan(ClosedLoop(4), warmup_requests=0, request_timeout_s=0.5)
    measurement, _ = measured(simulate_hang_after_requests=2, plan=plan)
    assert measurement.status is Status.FAILED
    assert "timeout" in measurement.failure.message
    assert measurement.metrics == {}


def test_a_server_that_dies_in_the_canary_is_a_failure(measured):
    measurement, runs = measured(canary=True, simulate_crash_after_requests=1)
    assert measurement.failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert runs == ()


def test_repeats_before_a_crash_are_kept_as_raw_runs(measured):
    measurement, runs = measured(repeats=3, simulate_crash_after_requests=12)
    assert measurement.status is Status.FAILED
    assert len(runs) == 1


def test_an_interrupt_in_a_replay_ends_the_server_and_passes_through(measured, engine):
    class Impatient(Recorder):
        def load(self, progress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(reporter=Impatient())
    assert engine.pids
    assert not psutil.pid_exists(engine.pids[0])


def test_a_replay_runs_on_the_loop_that_is_benchmarked(measured):
    uvloop = pytest.importorskip("uvloop")
    loops = set()

    class Watching(Recorder):
        def load(self, progress):
            loops.add(type(asyncio.get_running_loop()))

    measured(reporter=Watching())
    assert loops == {uvloop.Loop}


def test_kv_bytes_of_a_token_are_predicted_in_the_format_that_the_server_reports(
    measured, tmp_path
):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype, predicted in (("auto", 23_040), ("fp8", 11_520)):
        measurement, _ = measured(model=str(tmp_path), kv_cache_dtype=dtype)
        assert measurement.kv_bytes_per_token_predicted == predicted
        assert measurement.kv_bytes_per_token_observed == pytest.approx(predicted, rel=0.05)


def test_a_server_can_be_looked_at_once_it_was_measured(measured):
    seen = []

    def look(trial, server, measurement):
        seen.append((trial.number, server.failure(), server.effective))
        return measurement.model_copy(update={"asked_s": 7.0})

    measurement, _ = measured(afterwards=look)
    ((number, failure, effective),) = seen
    assert number == 0
    assert failure is None
    assert effective.max_model_len_tokens == 2048
    assert measurement.asked_s == 7.0, "who looked has the last word"
    measured(afterwards=look, simulate_crash_after_requests=3)
    assert len(seen) == 1, "there is nothing to look at after a crash"


class Cutter:
    """Ends a run once `count` requests of it ended."""

    def __init__(self, count):
        self.count = count
        self.seen = 0

    def saw(self, record):
        self.seen += 1

    def verdict(self, elapsed_s):
        return "cut, as it is hopeless" if self.seen >= self.count else None


def test_a_first_repeat_that_is_cut_ends_the_trial_and_fails_nothing(measured, engine):
    looked = []
    cut, runs = measured(
        load=[Request(input_tokens=16, output_tokens=2)] * 4
        + [Request(input_tokens=16, output_tokens=1500)] * 4,
        plan=LoadPlan(ClosedLoop(1), warmup_requests=0),
        repeats=3,
        simulate_time_scale=1.0,
        watch=Cutter(4),
        afterwards=lambda *args: looked.append(args),
    )
    assert cut.status is Status.CUT
    assert cut.failure is None
    assert cut.cut == "cut, as it is hopeless"
    assert cut.share == 0.5
    assert cut.requests_per_repeat == 4
    assert len(runs) == 1
    assert [record.ok for record in runs[0].records] == [True] * 4
    assert {len(values) for values in cut.metrics.values()} == {1}
    assert objective_values(GOAL, cut) == ()
    assert not meets_goal(GOAL, cut)
    assert looked == [], "nothing is asked of a server whose trial cannot win"


def test_a_server_that_is_far_slower_than_the_best_is_cut(measured):
    plan = LoadPlan(ClosedLoop(4), warmup_requests=0)
    load = [Request(input_tokens=16, output_tokens=64)] * 40
    _, (best,) = measured(load=load, plan=plan)
    pace = pace_of(3, [best.records], GOAL)
    slow, _ = measured(load=load, plan=plan, simulate_time_scale=1.0, watch=Race(pace, GOAL))
    assert slow.status is Status.CUT
    assert slow.share < 1
    assert "of its requests: at most 0." in slow.cut
    assert slow.cut.endswith("x of trial 3")


def test_the_seconds_of_a_trial_are_kept_by_what_they_went_into(measured):
    found, runs = measured(repeats=2)
    assert found.load_s == pytest.approx(sum(run.duration_s for run in runs))
    assert found.warmup_s > 0
    assert found.stop_s > 0
    assert found.start_s + found.warmup_s + found.load_s <= found.wall_s


def test_hits_that_no_request_of_a_run_made_possible_are_a_failure(measured, monkeypatch):
    monkeypatch.setattr("kvtune.autotune.replays.salt_of", lambda trial, repeat: 7)

    async def refused(endpoint):
        return False

    # The pool of 22 blocks keeps all of it: what is evicted first is a matter of timing.
    load = [Request(input_tokens=256, output_tokens=2) for _ in range(2)]
    fine, _ = measured(load=load, repeats=2)
    assert fine.status is Status.OK, "between repeats the cache is emptied"
    monkeypatch.setattr("kvtune.autotune.replays.reset_prefix_cache", refused)
    found, runs = measured(load=load, repeats=2)
    assert found.failure.failure is FailureClass.CONTAMINATED
    assert "of the prompt tokens beyond all that the requests share" in found.failure.message
    assert found.metrics == {}
    assert len(runs) == 1


def test_a_workload_of_which_nothing_fits_the_context_is_bad_input(measured):
    with pytest.raises(BadInput, match="none of the 1 requests fits the model's context of 2048"):
        measured(load=[Request(input_tokens=3, output_tokens=5000)])


def test_every_repeat_of_every_trial_has_a_salt_of_its_own():
    salts = [
        salt_of(trial_of(number=number).model_copy(update={"seed": seed}), repeat)
        for number in range(8)
        for repeat in range(3)
        for seed in range(3)
    ]
    assert len(salts) == len(set(salts))
