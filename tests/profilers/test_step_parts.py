"""A mean step taken apart, by hand: 0.1 s, 4 sequences of 1,100 tokens."""

import pytest
from contracts.windows import step_time, stepping
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.step_parts import step_parts
from kvtune.types import Bottleneck


def test_parts_are_those_of_the_step_time_model():
    seen = stepping(step_time=step_time(0.02, 0.0025, 10e-6, weight_read_s=0.015))
    found = step_parts(seen, {})
    assert found.is_fitted
    assert found.step_s == pytest.approx(0.1)
    assert found.shares == pytest.approx(
        {
            "overhead": 0.05,
            "reading weights": 0.15,
            "reading KV": 0.44,
            "decoding sequences": 0.1,
            "prefill": 0.26,
        }
    )


def test_weights_are_not_told_from_overhead_without_a_ceiling():
    found = step_parts(stepping(step_time=step_time(0.02, 0.0025, 10e-6)), {})
    assert found.shares["overhead and weights"] == pytest.approx(0.2)


def test_an_ideal_division_says_that_it_is_one_and_what_it_leaves():
    found = step_parts(stepping(), {Bottleneck.WEIGHT_BANDWIDTH: 0.3, Bottleneck.COMPUTE: 0.2})
    assert not found.is_fitted
    assert found.shares == pytest.approx(
        {"reading weights": 0.3, "arithmetic": 0.2, "not told apart": 0.5}
    )


def test_nothing_known_is_nothing_shown():
    assert step_parts(stepping(), {}) is None


@given(
    st.floats(0.0, 0.14),
    st.floats(0.0, 0.01),
    st.floats(0.0, 3e-5),
    st.floats(0.0, 0.2),
    st.integers(0, 4000),
)
def test_parts_are_a_whole_and_no_longer_than_what_was_seen_or_predicted(
    fixed_s, per_sequence_s, per_token_s, weight_read_s, prompt_tokens
):
    model = step_time(fixed_s, per_sequence_s, per_token_s, weight_read_s=weight_read_s)
    found = step_parts(stepping(step_tokens=400 + prompt_tokens, step_time=model), {})
    if found is None:
        return
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=0.03), "but for rounding"
    predicted_s = fixed_s + 4 * per_sequence_s + 4400 * per_token_s
    assert found.step_s == pytest.approx(max(0.1, predicted_s))
