"""The step-time model is recovered from noisy token times, or refused with what is missing."""

import numpy as np
import pytest
from contracts.decoding import Sequence, cells, decode, record
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.step_gaps import join, observations
from kvtune.profilers.step_time import fit_step_time, missing_for_fit
from kvtune.types import Ceilings, StepTimeModel

PLAN = [
    *((count, 64, 20) for count in (1, 2, 4, 8, 16)),
    *((4, inputs, 20) for inputs in (256, 1024, 2000)),
    (1, 2000, 20),
] * 3
TRUE = {"fixed_s": 0.04, "per_sequence_s": 0.001, "per_kv_token_s": 3e-6}
CEILINGS = Ceilings(
    device="cpu:x:1",
    read_bytes_per_s=10e9,
    copy_bytes_per_s=8e9,
    matrix_flop_per_s=1e12,
    matrix_dtype="bfloat16",
    threads=2,
    method="pretended",
    measured_at="",
)


def probed(plan=PLAN, **model):
    return join([observations(run, blocks=1) for run in cells(plan, **{**TRUE, **model})])


def wobble(random):
    """A tenth of noise, and one step in twenty that takes three times as long."""
    return random.lognormal(0, 0.1) * (3.0 if random.uniform() < 0.05 else 1.0)


def parts(model):
    return (model.fixed_s, model.per_sequence_s, model.per_kv_token_s)


def test_exact_steps_give_the_exact_model():
    found = probed()
    model = fit_step_time(found, source="probe")
    for part, true in zip(parts(model), TRUE.values(), strict=True):
        assert part.estimate == pytest.approx(true, rel=1e-6)
        assert part.low == pytest.approx(true, rel=1e-4)
        assert part.high == pytest.approx(true, rel=1e-4)
    assert model.error_share < 1e-6
    assert model.observations == len(found)
    assert model.source == "probe"
    assert StepTimeModel.model_validate_json(model.model_dump_json()) == model


@settings(max_examples=15, deadline=None)
@given(
    fixed_s=st.floats(0.002, 0.1),
    sequence_share=st.floats(0.01, 0.1),
    token_share=st.floats(5e-5, 5e-4),
)
def test_parts_are_recovered_under_noise_and_outliers(fixed_s, sequence_share, token_share):
    """Shares are those of the fixed part that a sequence, and a resident token, add to a step."""
    true = (fixed_s, sequence_share * fixed_s, token_share * fixed_s)
    found = probed(fixed_s=true[0], per_sequence_s=true[1], per_kv_token_s=true[2], noise=wobble)
    model = fit_step_time(found, source="probe")
    for sequences, resident in ((1, 100), (16, 1200), (4, 8000)):
        predicted_s = sum(
            part.estimate * amount
            for part, amount in zip(parts(model), (1, sequences, resident), strict=True)
        )
        expected_s = true[0] + true[1] * sequences + true[2] * resident
        assert predicted_s == pytest.approx(expected_s, rel=0.12)


@pytest.mark.parametrize("disturbed", [0, 8, 21])
def test_a_run_that_something_else_slowed_down_does_not_move_the_model(disturbed):
    costs = [
        {name: value * (3.0 if index == disturbed else 1.0) for name, value in TRUE.items()}
        for index in range(len(PLAN))
    ]
    runs = [cells([cell], **cost)[0] for cell, cost in zip(PLAN, costs, strict=True)]
    model = fit_step_time(join([observations(run, blocks=1) for run in runs]), source="probe")
    for part, true in zip(parts(model), TRUE.values(), strict=True):
        assert part.estimate == pytest.approx(true, rel=0.02)


def test_messages_that_come_early_and_late_do_not_move_the_model():
    model = fit_step_time(probed(jitter_s=0.01), source="probe")
    for part, true in zip(parts(model), TRUE.values(), strict=True):
        assert part.estimate == pytest.approx(true, rel=0.15)


def test_a_cost_of_zero_is_not_taken_for_a_negative_one():
    model = fit_step_time(probed(per_kv_token_s=0.0, noise=wobble), source="probe")
    assert model.per_kv_token_s.low == 0.0
    assert 0.0 <= model.per_kv_token_s.estimate <= model.per_kv_token_s.high < 3e-6


def test_intervals_cover_the_truth_as_often_as_they_say():
    """The noise is of whole runs, as on a shared machine: steps of a run say one thing together."""
    random = np.random.default_rng(7)
    covered = []
    for _ in range(30):
        runs = []
        for count, inputs, outputs in PLAN:
            slow = random.lognormal(0, 0.05)
            (run,) = cells(
                [(count, inputs, outputs)], **{name: slow * value for name, value in TRUE.items()}
            )
            runs.append(observations(run, blocks=1))
        model = fit_step_time(join(runs), source="probe")
        covered += [
            part.low <= true <= part.high
            for part, true in zip(parts(model), TRUE.values(), strict=True)
        ]
    assert np.mean(covered) > 0.87


def test_a_load_that_varies_gives_a_model_of_its_own():
    random = np.random.default_rng(1)
    requests = [
        Sequence(int(at), int(random.integers(20, 1500)), int(random.integers(5, 60)))
        for at in np.cumsum(random.exponential(8, 120))
    ]
    records = decode(requests, prefill_s=1e-4, noise=wobble, **TRUE)
    model = fit_step_time(observations(records), source="load")
    assert model.source == "load"
    assert model.fixed_s.low <= TRUE["fixed_s"] <= model.fixed_s.high
    assert model.per_kv_token_s.low <= TRUE["per_kv_token_s"] <= model.per_kv_token_s.high


def test_steps_with_a_request_in_the_queue_are_used_where_there_are_no_others():
    runs = cells(PLAN, **TRUE)
    found = join(
        [observations([*run, record(99, 0.0, [], 10, error="x")], blocks=1) for run in runs]
    )
    assert found.is_clear.all(), "the one that failed at once did not wait"
    queued = found.__class__(
        found.step_s,
        found.sequences,
        found.resident_tokens,
        np.zeros_like(found.is_clear),
        found.group,
    )
    model = fit_step_time(queued, source="load")
    assert model.fixed_s.estimate == pytest.approx(TRUE["fixed_s"], rel=1e-6)
    slowed = queued.__class__(
        2 * queued.step_s, queued.sequences, queued.resident_tokens, queued.is_clear, queued.group
    )
    both = fit_step_time(join([found, slowed]), source="load")
    assert both.fixed_s.estimate == pytest.approx(TRUE["fixed_s"], rel=1e-6)
    assert both.observations == len(found)


@pytest.mark.parametrize(
    ("plan", "missing"),
    [
        ([(4, 64, 20), (4, 1000, 20), (4, 2000, 20)] * 3, "sequences that decode together"),
        ([(1, 100, 6), (2, 50, 6), (4, 20, 6)] * 3, "resident tokens hardly varied"),
        ([(1, 500, 10), (2, 500, 10), (4, 500, 10), (8, 500, 10)] * 3, "rose and fell with"),
        ([(1, 100, 20), (4, 900, 20)], "2 stretches"),
        ([], "no step"),
    ],
)
def test_what_does_not_vary_cannot_be_fitted(plan, missing):
    found = probed(plan)
    assert fit_step_time(found, source="load") is None
    assert any(missing in reason for reason in missing_for_fit(found))


def test_what_can_be_fitted_misses_nothing():
    assert missing_for_fit(probed()) == ()


def test_bytes_and_ceilings_divide_the_fixed_part_and_name_a_bandwidth():
    model = fit_step_time(
        probed(),
        source="probe",
        weight_bytes=269_000_000,
        kv_bytes_per_token=23_040,
        ceilings=CEILINGS,
    )
    assert model.weight_read_s == pytest.approx(0.0269)
    bandwidth = model.kv_bytes_per_s
    assert bandwidth.estimate == pytest.approx(23_040 / 3e-6)
    assert bandwidth.unit == "bytes/s"
    assert bandwidth.low <= bandwidth.estimate <= bandwidth.high
    heavy = fit_step_time(probed(), source="probe", weight_bytes=10**9, ceilings=CEILINGS)
    assert heavy.weight_read_s == heavy.fixed_s.estimate, "a step cannot read longer than it takes"
    assert heavy.kv_bytes_per_s is None


def test_a_bandwidth_has_no_upper_bound_where_reading_may_cost_nothing():
    found = probed(per_kv_token_s=5e-8, noise=wobble)
    model = fit_step_time(found, source="probe", kv_bytes_per_token=23_040)
    if model.per_kv_token_s.estimate == 0:
        assert model.kv_bytes_per_s is None
    else:
        assert model.per_kv_token_s.low == 0
        assert model.kv_bytes_per_s.high is None
        assert model.kv_bytes_per_s.low > 0


def test_equal_observations_give_equal_models():
    found = probed(noise=wobble)
    assert fit_step_time(found, source="probe") == fit_step_time(found, source="probe")
