"""What earlier studies of alike workloads give a new one to start from, and which are alike."""

import math
from dataclasses import asdict, replace

import pytest
from contracts.landscape import DEVICE, GOAL, ONLY_BLOCK_SIZE, failed, workload
from contracts.policy_samples import on_gpu
from contracts.store_values import ENGINE

from kvtune.autotune.explore.kin import Kin, distance, kin_of, starts
from kvtune.autotune.limits import Budget, Sampler
from kvtune.autotune.space import build_space, stack_from
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.load.client import ClosedLoop, OpenLoop
from kvtune.store.rows import StudyRow
from kvtune.types import FailureClass, Goal, Harm, Histogram, Request, Slo, Trial, Workload
from kvtune.types import WorkloadFingerprint as Fingerprint

BUDGET = Budget(trials=4, finalists=1, confirm_rounds=2)


def lengths(p50, p95):
    return Histogram(edges=(0.0, 1e6), counts=(1,), mean=p50, p50=p50, p95=p95, p99=p95)


def seen(inputs=(100, 200), outputs=(10, 20), rate=None, reuse=0.5):
    return Fingerprint(
        requests=8,
        input_tokens=lengths(*inputs),
        output_tokens=lengths(*outputs),
        duration_s=None,
        request_rate_per_s=rate,
        burstiness=None,
        reusable_prefix_share={16: reuse, 32: reuse},
    )


def study(found=None, arrivals=None, goal=GOAL):
    return StudyRow(
        id="1",
        name="s",
        created_at="",
        kvtune_version="",
        model="m",
        workload_name="w",
        goal=goal,
        engine=ENGINE,
        device=DEVICE,
        fingerprint=found or seen(),
        base_arguments={},
        settings={"arrivals": repr(arrivals or ClosedLoop(4))},
    )


def since(arrivals, **more):
    """A study of a kvtune that stores its load in numbers beside the words."""
    load = {"kind": type(arrivals).__name__, **asdict(arrivals)}
    older = study(arrivals=arrivals)
    return older.model_copy(update={"settings": {**older.settings, "load": load, **more}})


# --- how alike ----------------------------------------------------------------------------------


def limit(seconds):
    return Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=seconds),))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (study(), 0.0),
        (study(seen(inputs=(110, 220))), math.log(1.1)),
        (study(seen(inputs=(100, 400))), math.log(2) / 2),
        (study(seen(outputs=(5, 10))), math.log(2)),
        (study(seen(reuse=0.2)), 0.3),
        (study(arrivals=ClosedLoop(6)), math.log(1.5)),
        (study(arrivals=OpenLoop()), math.inf),
        (study(goal=limit(2.0)), math.log(2)),
        (study(goal=Goal()), 0.3),
        (study(goal=Goal(objective="throughput")), math.inf),
    ],
    ids=[
        *("same", "longer", "tail", "outputs", "reuse", "in-flight", "open-loop", "limit"),
        *("no-limit", "objective"),
    ],
)
def test_the_distance_adds_up_what_differs(other, expected):
    assert distance(study(), other) == pytest.approx(expected)
    assert distance(other, study()) == pytest.approx(expected)


@pytest.mark.parametrize("arrivals", [ClosedLoop(4), OpenLoop(), OpenLoop(2.0, 3)])
def test_a_load_is_the_same_in_words_and_in_numbers(arrivals):
    assert distance(study(arrivals=arrivals), since(arrivals)) == 0
    assert distance(since(arrivals), since(ClosedLoop(6))) == pytest.approx(
        math.log(1.5) if isinstance(arrivals, ClosedLoop) else math.inf
    )


def test_a_load_that_is_raised_as_far_as_the_goal_holds_is_another_kind():
    raised = since(ClosedLoop(4), load_at="boundary")
    assert distance(raised, since(ClosedLoop(4))) == math.inf
    assert distance(raised, since(ClosedLoop(64), load_at="boundary")) == 0, "it only begins there"


def test_arrivals_are_compared_at_the_rate_at_which_they_are_sent():
    once = study(seen(rate=2.0), OpenLoop())
    assert distance(once, study(seen(rate=4.0), OpenLoop(time_scale=2.0))) == 0
    assert distance(once, study(seen(rate=2.0), OpenLoop(time_scale=0.5))) == pytest.approx(
        math.log(2)
    )


def test_texts_of_unknown_length_are_not_taken_for_the_same():
    def chats(text):
        made = [Request(messages=({"role": "user", "content": text},), output_tokens=8)] * 4
        return study(fingerprint(made))

    assert distance(chats("short"), chats("short")) == 0
    assert distance(chats("short"), chats("a long document " * 500)) == pytest.approx(0.3)


# --- what a second search does with it ------------------------------------------------------------


def unlike(requests=8, tokens=400):
    made = tuple(Request(input_tokens=tokens + n, output_tokens=4) for n in range(requests))
    return Workload("long", "w.jsonl", made[:-2], made[-2:], fingerprint(made))


def small_blocks_help(arguments):
    return 10.0 if arguments.get("block-size") == 32 else 1.0


@pytest.fixture
def search(tuning_on, landscape):
    landscape.goodput = small_blocks_help
    return lambda **more: tuning_on(
        **{"budget": BUDGET, "base": ONLY_BLOCK_SIZE, "max_harm": Harm.LOSSLESS, **more}
    )


def first_and_second(search, landscape, **more):
    """The second search, and the second point that it measured."""
    first = search(name="first").run()
    assert first.figures["goodput_requests_per_s"].estimate == pytest.approx(10, rel=0.01)
    before = len(landscape.points)
    second = search(name="second", **more)
    second.run()
    return second, landscape.points[before:][1]


def noted(tuning):
    return [note for note in tuning.reporter.notes if note.startswith("starts from")]


def test_a_second_search_measures_the_best_of_the_first_second_and_says_so(search, landscape):
    tuning, point = first_and_second(search, landscape, seed=5)
    assert point["block-size"] == 32
    assert noted(tuning) == [
        "starts from the front of study first (workload 100% alike): block-size 32"
    ]


def test_an_alike_workload_is_enough(search, landscape):
    tuning, point = first_and_second(search, landscape, on=workload(tuned=7, heldout=4))
    assert point["block-size"] == 32
    (note,) = noted(tuning)
    assert 90 < int(note.partition("workload ")[2].partition("%")[0]) < 100


def test_unlike_studies_are_no_kin(search):
    search(name="first").run()
    second = search(name="second").study
    store = search(name="second").store
    assert [kin.alike for kin in kin_of(second, store)] == [1.0]
    for name, value in {
        "model": "org/other",
        "device": DEVICE.model_copy(update={"count": 2}),
        "engine": second.engine.model_copy(update={"name": "another"}),
        "fingerprint": unlike().fingerprint,
        "settings": {"arrivals": repr(ClosedLoop(16))},
    }.items():
        assert kin_of(second.model_copy(update={name: value}), store) == [], name


def test_an_unlike_workload_starts_from_nothing(search):
    search(name="first").run()
    second = search(name="second", on=unlike())
    second.run()
    assert noted(second) == []


def test_a_search_that_goes_on_does_not_start_anew(search, landscape):
    first_and_second(search, landscape, seed=5)
    again = search(name="second", seed=5)
    again.run()
    assert noted(again) == []


def test_where_stock_was_best_there_is_nothing_to_start_from(search, landscape):
    landscape.goodput = lambda arguments: 1.0 if arguments.get("block-size") else 10.0
    search(name="first").run()
    second = search(name="second", seed=5)
    second.run()
    assert noted(second) == []


def test_points_that_miss_the_goal_are_not_started_from(search, landscape):
    landscape.ttft_s = lambda arguments: 2.0
    search(name="first").run()
    second = search(name="second", seed=5)
    (kin,) = kin_of(second.study, second.store)
    assert kin.front == ()


def test_what_failed_there_is_known_with_how_alike_it_was(search, landscape):
    landscape.goodput = lambda arguments: (
        failed(FailureClass.DOES_NOT_FIT) if arguments.get("block-size") == 64 else 1.0
    )
    search(name="first").run()
    second = search(name="second", on=workload(tuned=7, heldout=4))
    (kin,) = kin_of(second.study, second.store)
    (lost,) = kin.failed
    assert lost.arguments == {"block-size": 64}
    assert lost.failure is FailureClass.DOES_NOT_FIT
    assert lost.task == kin.alike < 1


def test_harm_of_kin_waits_until_it_may_be_tried(search, landscape):
    landscape.goodput = lambda arguments: 10.0 if "kv-cache-dtype" in arguments else 1.0
    harmful = {"max_harm": Harm.NEAR_LOSSLESS, "explore_lossy": True, "budget": Budget(trials=6)}
    search(name="first", **harmful).run()
    lossless = search(name="second", seed=5)
    lossless.run()
    assert noted(lossless) == []
    wide = search(name="third", seed=6, **harmful)
    wide.run()
    (note,) = noted(wide)
    assert "kv-cache-dtype fp8" in note


def test_harm_of_kin_is_tried_first_once_it_is_unlocked(search, landscape):
    """Only 8-bit formats meet the goal; e5m2 is the one that served best before."""
    landscape.ttft_s = lambda arguments: 0.5 if "kv-cache-dtype" in arguments else 2.0
    landscape.goodput = lambda arguments: 10.0 if arguments == best else 1.0
    best = {**ONLY_BLOCK_SIZE, "block-size": 64, "kv-cache-dtype": "fp8_e5m2"}
    wide = {"max_harm": Harm.NEAR_LOSSLESS, "budget": Budget(trials=12), "sampler": Sampler.TPE}
    search(name="first", **wide).run()
    before = len(landscape.points)
    second = search(name="second", seed=5, **{**wide, "budget": Budget(trials=10)})
    second.run()
    points = landscape.points[before:]
    first_harmful = next(one for one in points if "kv-cache-dtype" in one)
    assert first_harmful == best
    (note,) = noted(second)
    assert "kv-cache-dtype fp8_e5m2" in note


def test_what_was_measured_before_a_rung_opens_is_not_started_from_again(search, landscape):
    """Blocks of 64 met the goal before; now nothing lossless does."""
    wide = {"max_harm": Harm.NEAR_LOSSLESS, "budget": Budget(trials=10), "sampler": Sampler.TPE}
    landscape.goodput = lambda arguments: 10.0 if arguments.get("block-size") == 64 else 1.0
    search(name="first", **{**wide, "max_harm": Harm.LOSSLESS}).run()
    landscape.ttft_s = lambda arguments: 0.5 if "kv-cache-dtype" in arguments else 2.0
    second = search(name="second", seed=5, **wide)
    second.run()
    (note,) = noted(second)
    assert "block-size 64" in note


def test_a_point_without_what_changed_answers_there_is_another_one():
    near, lossy = (build_space(on_gpu(), harm=harm) for harm in (Harm.NEAR_LOSSLESS, Harm.LOSSY))
    stack = stack_from(lossy, {"kv_cache_dtype": "int4_per_token_head", "block_size": 32}, on_gpu())
    trial = Trial(number=3, stack=stack, base_arguments={}, repeats=1, seed=0)
    kin = Kin(study(), 1.0, (trial,), ())
    assert [one.stack for one in starts([kin], lossy, on_gpu())] == [stack]
    assert starts([kin], near, on_gpu()) == []


# --- on simulated servers -------------------------------------------------------------------------


class FastWithSmallBlocks(SimulatedEngine):
    """Serves a hundred times as fast with blocks of 32 tokens."""

    def launch(self, spec, **options):
        scale = 0.01 if spec.arguments.get("block-size") == 32 else 1.0
        arguments = {**spec.arguments, "simulate-time-scale": scale}
        return super().launch(replace(spec, arguments=arguments), **options)


def test_simulated_servers_are_tried_first_as_they_served_best_before(tuning_on):
    def make(**more):
        base = {**ONLY_BLOCK_SIZE, "max-model-len": 2048, "kv-cache-memory-bytes": 64 << 20}
        return tuning_on(
            engine=FastWithSmallBlocks(),
            base=base,
            goal=Goal(objective="throughput"),
            max_harm=Harm.LOSSLESS,
            **more,
        )

    make(name="first", budget=Budget(trials=4, finalists=1, confirm_rounds=1)).run()
    second = make(name="second", seed=5, budget=Budget(trials=2, finalists=1, confirm_rounds=1))
    second.run()
    assert second.store.trial("second", 1).trial.stack.arguments == {"block-size": 32}
    assert noted(second) == [
        "starts from the front of study first (workload 100% alike): block-size 32"
    ]
