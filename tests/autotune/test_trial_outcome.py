"""What the replays of a trial amount to: a failure, a warning, or figures."""

from itertools import count
from types import SimpleNamespace

import pytest
from contracts.decoding import Sequence, decode
from contracts.landscape import GOAL, Recorder

from kvtune.autotune.replays import fixed_load, request_failure
from kvtune.autotune.trial import check_model, measurement_of, warnings_of
from kvtune.errors import BadInput
from kvtune.types import (
    EffectiveConfig,
    FailureClass,
    LoadRun,
    RequestRecord,
)


def record(index=0, *, error=None, output=4, wanted=4):
    first = None if error else 0.1
    return RequestRecord(index, 0.0, 0.0, first, 1.0, (), 8, output, wanted, error=error)


def run_with(*records, warnings=()):
    return LoadRun(tuple(records), 1.0, 0.0, {}, {}, tuple(warnings))


def test_a_request_in_a_hundred_may_fail_and_more_is_a_failure():
    good = [record(index) for index in range(99)]
    refused = record(99, error="HTTP 500")
    assert request_failure(run_with(*good, refused)) is None
    failure = request_failure(run_with(*good, refused, refused))
    assert failure.failure is FailureClass.REQUEST_ERRORS
    assert failure.message == "2 of 101 requests failed; the first: HTTP 500"
    assert request_failure(run_with(*good[:50], refused)), "1 of 51 is more than 1%"


def test_requests_that_stalled_are_a_hang():
    stalled = record(error="stalled: the server sent nothing for 120 s")
    failure = request_failure(run_with(record(), stalled, stalled))
    assert failure.failure is FailureClass.HANG_UNDER_LOAD


def test_a_replay_without_records_is_a_hang_that_says_what_the_client_saw():
    failure = request_failure(run_with(warnings=["stalled; during the warm-up"]))
    assert failure.failure is FailureClass.HANG_UNDER_LOAD
    assert "during the warm-up" in failure.message


def test_answers_shorter_than_asked_for_are_a_warning():
    assert warnings_of(run_with(record(), warnings=["late"])) == ("late",)
    assert warnings_of(run_with(record(output=3), record())) == (
        "1 requests returned fewer tokens than were asked for",
    )


def slowing(most):
    """A run whose steps take up to 1 + `most` times as long at its end as at its beginning."""
    waves = [Sequence(20 * wave, 100 + 37 * wave % 400, 20) for wave in range(20) for _ in range(4)]
    steps = count()
    slows = decode(
        waves,
        fixed_s=0.02,
        per_sequence_s=0.001,
        per_kv_token_s=1e-6,
        noise=lambda random: (1 + most * next(steps) / 400) * random.uniform(0.97, 1.03),
    )
    return run_with(*slows)


def test_figures_of_a_machine_that_slowed_down_meanwhile_are_doubted():
    (warning,) = warnings_of(slowing(0.5))
    assert "slower during this run" in warning
    assert warnings_of(slowing(0.0)) == ()


@pytest.mark.parametrize(
    ("slower", "kept"),
    [((0.0,), 0), ((0.5, 0.0), 1), ((0.5, 0.5), 1), ((0.0, 0.5, 0.0), 2)],
    ids=["steady", "changed", "changed twice", "changed in the second repeat"],
)
def test_a_replay_during_which_the_machine_changed_is_made_once_more(slower, kept):
    runs = [slowing(most) for most in slower]
    left, reporter = list(runs), Recorder()
    replays = SimpleNamespace(
        bench=SimpleNamespace(plan=None, reporter=reporter),
        trial=SimpleNamespace(repeats=2 if kept == 2 else 1),
        replay=lambda requests, plan, watch=None: (left.pop(0), None),
    )
    loaded = fixed_load(replays, (), None)
    assert left == []
    assert loaded.runs[-1] is runs[kept]
    assert len(loaded.runs) == replays.trial.repeats
    assert len(reporter.notes) == (kept > 0)


def test_only_metrics_of_every_repeat_count_and_warnings_are_said_once():
    server = SimpleNamespace(
        effective=EffectiveConfig(engine_version="1.2"), warnings=("started cold",), start_s=1.0
    )
    timed = run_with(record(), warnings=["late", "late"])
    untimed = run_with(record(error="HTTP 500"), record(error="HTTP 500"))
    measurement = measurement_of([timed, untimed], GOAL, server, wall_s=2.0)
    assert "ttft_p95_s" not in measurement.metrics
    assert measurement.metrics["failed_requests"] == (0.0, 2.0)
    assert measurement.warnings == ("started cold", "late")
    assert measurement.versions["engine"] == "1.2"
    assert measurement.kv_bytes_per_token_observed is None


# --- the model ----------------------------------------------------------------------------------


def test_a_model_path_that_is_not_there_is_refused_and_a_hub_id_passes(tmp_path):
    check_model("org/name")
    with pytest.raises(BadInput, match="does not exist"):
        check_model(str(tmp_path / "missing"))
    with pytest.raises(BadInput, match=r"no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
