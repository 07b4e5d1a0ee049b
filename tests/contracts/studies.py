"""Studies in a store as searches leave them: trials, rounds of the confirmation, and failures."""

from itertools import count

from contracts.store_values import a_study

from kvtune.autotune.ledger import RUNG_CONFIRM
from kvtune.autotune.report.study_view import StudyView, study_view
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Choice,
    EffectiveConfig,
    Failure,
    FailureClass,
    Harm,
    Interval,
    Measurement,
    PolicyStack,
    QualityFigure,
    QualityReport,
    Status,
    Trial,
)

MIB = 1 << 20
HARMS = {"kv-cache-dtype": Harm.NEAR_LOSSLESS, "kv-bits": Harm.LOSSY}
RIGHT = ("The code is 7194.", "The code is 5823.", "The code is 3461.")
"""Answers that find what the long-prompt canary asks for."""

NUMBERS = count()


def measured(goodput, *, ttft_s=0.5, memory_bytes=64 * MIB, **more) -> Measurement:
    """A measurement within the limit of `store_values.GOAL`, 0.8 s, unless told otherwise."""
    return Measurement(
        **{
            "status": Status.OK,
            "metrics": {"goodput_requests_per_s": (goodput,), "ttft_p95_s": (ttft_s,)},
            "effective": EffectiveConfig(
                block_size_tokens=16,
                max_num_seqs=128,
                kv_cache_memory_bytes=memory_bytes,
                start_kind="warm",
            ),
            "cache": "cold",
            "requests_per_repeat": 40,
            "start_s": 2.0,
            "wall_s": 10.0,
            "canary_answers": RIGHT,
            **more,
        }
    )


def failed(
    failure=FailureClass.CRASH_UNDER_LOAD, message="it died", fix="read the log", log=""
) -> Measurement:
    return Measurement(
        status=Status.FAILED,
        failure=Failure(failure=failure, message=message, fix=fix, log_excerpt=log),
    )


def stack(arguments) -> PolicyStack:
    return PolicyStack(
        choices=tuple(
            Choice(
                policy=name.replace("-", "_"),
                parameters={},
                arguments={name: value},
                harm=HARMS.get(name, Harm.LOSSLESS),
                because=f"{name} may help",
            )
            for name, value in arguments.items()
        )
    )


def add(
    store: Store,
    study: StudyRow,
    number: int,
    arguments,
    found: Measurement | None,
    *,
    parent: int | None = None,
    seed: int = 0,
    rung: int | None = None,
) -> None:
    """A trial with its outcome; without one it is left as a search that was killed leaves it."""
    trial = Trial(
        number=number,
        stack=stack(arguments),
        base_arguments={},
        repeats=1,
        seed=seed,
        parent=parent,
    )
    attempt = store.begin_attempt(study, trial, f"key {study.name} {number}", rung=rung)
    if found is not None:
        store.finish_attempt(attempt, found, ())


def add_round(store, study, number, parent, arguments, goodput, of_round) -> None:
    found = goodput if isinstance(goodput, Measurement) else measured(goodput)
    add(
        store,
        study,
        number,
        arguments,
        found,
        parent=parent,
        seed=of_round,
        rung=RUNG_CONFIRM,
    )


def new_study(store: Store, **more) -> StudyRow:
    """A study that has no trial yet; tests of a file may share the store."""
    return a_study(store, f"study {next(NUMBERS)}", **more)


def of(store: Store, *trials, **more) -> StudyView:
    """A study of these (arguments, measurement), seen."""
    study = new_study(store, **more)
    for number, (arguments, found) in enumerate(trials):
        add(store, study, number, arguments, found)
    return study_view(store, study)


def figure(**changes) -> QualityFigure:
    """That of the whole fidelity suite: a divergence of 0.01 nats."""
    return QualityFigure(
        **{
            "suite": "fidelity",
            "category": "",
            "metric": "kl",
            "unit": "nats",
            "better": "lower",
            "kind": "level",
            "limit": 0.02,
            "items": 8,
            "candidate": 0.01,
            "baseline": 0.0,
            "change": Interval(estimate=0.01, low=0.008, high=0.012, unit="nats"),
            "outcome": "pass",
            "because": "below the limit",
            **changes,
        }
    )


def report(outcome="pass", *figures) -> QualityReport:
    found = figures or (figure(outcome=outcome),)
    return QualityReport(outcome=outcome, figures=found, size="screen")
