"""Values for tests of the store, each with something in it that is easy to lose."""

from kvtune.store import Store, StudyRow, point_key
from kvtune.types import (
    BrokenAnswer,
    Ceilings,
    Choice,
    Decision,
    Device,
    EffectiveConfig,
    EngineInfo,
    Failure,
    FailureClass,
    Forecast,
    Goal,
    Harm,
    Histogram,
    Interval,
    LoadRun,
    Measurement,
    Outcome,
    OutputHealth,
    PolicyStack,
    Profile,
    QualityFigure,
    QualityReport,
    RequestRecord,
    ServingConfig,
    Setting,
    Slo,
    Status,
    Trial,
    Verdict,
    WorkloadFingerprint,
)

ENGINE = EngineInfo(
    name="vllm", version="0.11.0", distribution="vllm", platform="cuda", python="/usr/bin/python3"
)
DEVICE = Device(kind="cuda", name="A thing", count=2, memory_bytes=80 << 30, driver="550.1")
GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=0.8),))
FINGERPRINT = WorkloadFingerprint(
    requests=3,
    input_tokens=Histogram(edges=(1, 2, 4), counts=(1, 2), mean=2.5, p50=2, p95=4, p99=None),
    output_tokens=None,
    duration_s=1.5,
    request_rate_per_s=2.0,
    burstiness=None,
    reusable_prefix_share={16: 0.5, 512: 0.0},
    digest="abc",
)


def a_study(store: Store, name: str = "chat", goal: Goal = GOAL) -> StudyRow:
    return store.create_study(
        name,
        goal=goal,
        model="some/model",
        engine=ENGINE,
        device=DEVICE,
        workload_name="chat.jsonl",
        fingerprint=FINGERPRINT,
        base_arguments={"max-model-len": 4096, "enforce-eager": True},
        settings={"requests": 200, "rate": 2.5, "nested": {"a": [1, None]}},
    )


def a_trial(number: int = 0, block_size: int = 16) -> Trial:
    choice = Choice(
        policy="block_size",
        parameters={"block_size": block_size},
        arguments={"block-size": block_size},
        harm=Harm.LOSSLESS,
        because="larger blocks hash less",
    )
    return Trial(
        number=number,
        stack=PolicyStack(choices=(choice,)),
        base_arguments={"max-model-len": 4096},
        repeats=2,
        seed=7,
    )


def a_key(trial: Trial) -> str:
    return point_key(
        model="some/model",
        engine=ENGINE,
        device=DEVICE,
        workload_digest=FINGERPRINT.digest,
        arguments=trial.arguments,
        settings={"requests": 200},
    )


def a_run(requests: int = 3, seed: int = 0) -> LoadRun:
    records = tuple(
        RequestRecord(
            index=index,
            scheduled_s=0.1 * index,
            sent_s=0.1 * index + 1e-9,
            first_token_s=None if index == 1 else 0.5,
            end_s=1.0 / 3.0 + index,
            gaps_s=() if index == 1 else (0.01, 0.0, 0.02 + seed),
            input_tokens=12,
            output_tokens=0 if index == 1 else 4,
            requested_output_tokens=4,
            cached_tokens=8,
            finish_reason=None if index == 1 else "length",
            error="502 Bad Gateway" if index == 1 else None,
            text="naïve \0 ünïcode 🙂",
        )
        for index in range(requests)
    )
    return LoadRun(
        records=records,
        duration_s=2.0,
        client_cpu_s=0.25,
        counters={'vllm:request_success_total{finished_reason="stop"}': 2.0},
        gauges={"vllm:kv_cache_usage_perc": [(0.0, 0.1), (0.5, 0.7)]},
        warnings=("the client was late once",),
    )


def ok(goodput: float = 2.0) -> Measurement:
    return Measurement(
        status=Status.OK,
        metrics={
            "goodput_requests_per_s": (goodput, goodput + 0.5),
            "output_tokens_per_s": (100.0 * goodput,),
            "kv_waiting_ratio": (float("inf"),),
        },
        effective=EffectiveConfig(num_gpu_blocks=1000, start_kind="warm", source=("log",)),
        counters=({"vllm:prompt_tokens_total": 36.0}, {"vllm:prompt_tokens_total": 36.0}),
        warnings=("drift between repeats",),
        cache="cold",
        requests_per_repeat=3,
        start_s=12.5,
        wall_s=60.0,
        outputs=OutputHealth(
            answers=3,
            text_prompts=3,
            long_prompts=None,
            unreadable=1,
            examples=(BrokenAnswer(request=1, kind="unreadable", why="é", text="a\0\ufffd🙂"),),
        ),
        versions={"kvtune": "0.1.0", "torch": "2.9"},
        measured_at="2026-11-29T12:00:00+00:00",
    )


def failed(failure: FailureClass = FailureClass.CRASH_UNDER_LOAD) -> Measurement:
    return Measurement(
        status=Status.FAILED,
        failure=Failure(
            failure=failure,
            message="the server died",
            fix="lower the memory",
            log_excerpt="CUDA error\nkilled by signal 9",
        ),
    )


def a_decision(outcome: Outcome = Outcome.WINNER) -> Decision:
    gain = Interval(estimate=1.2, low=1.1, high=1.3, unit="ratio", repeats=5, method="bootstrap")
    return Decision(
        outcome=outcome,
        recommended=3,
        baseline=0,
        ties=(2,),
        figures={"goodput_requests_per_s": gain},
        gain_ratio=gain,
        reasons=("it is faster",),
        rejected={1: "it crashed", 10: "slower"},
    )


def a_profile(model: str = "some/model") -> Profile:
    return Profile(
        model=model,
        endpoint_url="http://127.0.0.1:8000",
        device=DEVICE,
        engine=None,
        effective=None,
        fingerprint=FINGERPRINT,
        metrics={"ttft_p95_s": (0.5,)},
        counters={"vllm:num_preemptions_total": 3.0},
        window_s=30.0,
        verdict=Verdict(
            bottleneck="kv-capacity", confidence="high", evidence=(), summary="it is full"
        ),
    )


def some_ceilings(device: Device = DEVICE, read_bytes_per_s: float = 1e12 / 3) -> Ceilings:
    return Ceilings(
        device=device.key,
        read_bytes_per_s=read_bytes_per_s,
        copy_bytes_per_s=2e11,
        matrix_flop_per_s=9e14,
        matrix_dtype="bfloat16",
        threads=None,
        method="best pass",
        measured_at="2026-11-29T12:00:00+00:00",
    )


def a_forecast(metric: str = "goodput_requests_per_s", **changes) -> Forecast:
    fields = {
        "lever": "kv memory x2",
        "arguments": {"kv-cache-memory-bytes": 1 << 30},
        "metric": metric,
        "unit": "requests/s",
        "baseline": 2.0,
        "predicted": 3.0,
        "reason": "doubles the memory",
    }
    return Forecast(**{**fields, **changes})


def a_quality_report(**changes) -> QualityReport:
    figure = QualityFigure(
        suite="needle",
        category="single",
        metric="recall",
        unit="share",
        better="higher",
        kind="difference",
        limit=0.05,
        items=24,
        candidate=0.5,
        baseline=0.75,
        change=Interval(estimate=-0.25, low=-0.5, high=-0.125, unit="share", method="tango"),
        outcome="fail",
        because="6 of 24 items broke",
    )
    return QualityReport(**{"outcome": "fail", "figures": (figure,), **changes})


def a_config(study: str = "chat") -> ServingConfig:
    return ServingConfig(
        study=study,
        trial=3,
        outcome=Outcome.WINNER,
        model="some/model",
        engine=ENGINE,
        device=DEVICE,
        settings=(Setting(name="block-size", value=32, because="fewer hashes"),),
        goal=GOAL,
        kvtune_version="0.1.0",
        created_at="2026-11-29T12:00:00+00:00",
    )


def measure(store: Store, study: StudyRow | str, trial: Trial, measurement: Measurement) -> str:
    """Begin an attempt and finish it; returns its id."""
    attempt = store.begin_attempt(study, trial, a_key(trial))
    runs = [a_run(seed=0), a_run(seed=1)] if measurement.status is Status.OK else []
    store.finish_attempt(attempt, measurement, runs)
    return attempt


def a_full_history(store: Store) -> None:
    """A row of every kind, and more of some."""
    study = a_study(store)
    trial = a_trial(0)
    attempt = store.begin_attempt(study, trial, a_key(trial), optuna_number=4, rung=1)
    store.finish_attempt(attempt, ok(), [a_run(), a_run(seed=1)], figures={"told": 2.25})
    measure(store, study, a_trial(1, block_size=32), failed())
    measure(store, study, a_trial(1, block_size=32), Measurement(status=Status.STOPPED))
    store.save_decision(study, a_decision(Outcome.NO_CLEAR_WINNER))
    store.save_decision(study, a_decision())
    store.save_step(study, "unlock", "the goal was missed\0", trial=1)
    store.save_profile(a_profile())
    store.save_emitted(a_config(), "compose", "/somewhere/out", {"compose.yaml": "0" * 64})
    store.save_ceilings(some_ceilings())
    store.save_forecasts("subject", [a_forecast(), a_forecast("itl_p50_s")])
    store.score_forecasts(
        "subject",
        a_forecast().arguments,
        {"itl_p50_s": (1 / 3, 0.1)},
        study="chat",
        trial=1,
    )
    store.save_quality_answers("a key", '{"answers": ["\u00e9"]}')
    store.save_quality_report(a_quality_report(), study="chat", trial=1)
    store.save_quality_report(a_quality_report(outcome="pass", figures=()))
    other = a_study(store, "batch", Goal(objective="throughput"))
    store.reuse(other, trial, a_key(trial))
