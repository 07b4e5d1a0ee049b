"""Decode steps are read off token times: who decoded, how much was resident, and how long."""

import numpy as np
import pytest
from contracts.decoding import Sequence, decode, record
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.step_gaps import join, observations


def table(found):
    return [
        (round(step_s, 6), int(count), int(resident), bool(clear))
        for step_s, count, resident, clear in zip(
            found.step_s, found.sequences, found.resident_tokens, found.is_clear, strict=True
        )
    ]


def test_a_sequence_alone_grows_by_a_token_a_step():
    found = observations([record(0, 0.0, [1.0, 1.1, 1.2, 1.3], 50)])
    assert table(found) == [(0.1, 1, 51, True), (0.1, 1, 52, True), (0.1, 1, 53, True)]


def test_two_sequences_are_resident_together_while_both_decode():
    long = record(0, 0.0, [1.0, 1.1, 1.2, 1.3, 1.4], 50)
    short = record(1, 0.0, [1.0, 1.1, 1.2], 20)
    assert sorted(table(observations([long, short]))) == [
        (0.1, 1, 53, True),
        (0.1, 1, 54, True),
        (0.1, 2, 74, True),
        (0.1, 2, 74, True),
    ], "the first step of each may hold some of the other's prefill"


def test_a_step_in_which_another_request_got_its_first_token_is_left_out():
    first = record(0, 0.0, [1.0, 1.1, 1.6, 1.7, 1.8], 50)
    joins = record(1, 1.12, [1.602, 1.702, 1.802], 20)
    found = observations([first, joins])
    assert max(found.step_s) == pytest.approx(0.1)
    assert (0.1, 1, 51, True) in table(found)
    assert len(found) == 4, "the step before, and those of both after the joint step"


def test_a_step_during_which_another_request_waits_is_marked():
    first = record(0, 0.0, [1.0, 1.1, 1.2, 1.3, 1.4], 50)
    queued = record(1, 1.14, [], 20, error="timeout")
    queued = queued.__class__(**{**{f: getattr(queued, f) for f in queued.__slots__}, "end_s": 1.3})
    assert [row[3] for row in table(observations([first, queued]))] == [True, False, False, True]


def test_tokens_of_one_message_share_its_time():
    """Three tokens in 0.3 s are steps of 0.1 s, in one read of the socket or in one message."""
    found = observations([record(0, 0.0, [1.0, 1.3, 1.3, 1.30005, 1.4], 10)])
    assert table(found) == [(0.1, 1, 11, True), (0.1, 1, 14, True)]


def test_a_preempted_sequence_neither_decodes_nor_is_resident():
    stays = record(0, 0.0, [1.0 + 0.1 * i for i in range(41)], 100)
    paused = record(1, 0.0, [1.0, 1.1, 1.2, 4.2, 4.3, 4.4], 30)
    found = observations([stays, paused])
    assert max(found.step_s) == pytest.approx(0.1)
    middle = [row for row in table(found) if row[1] == 1]
    assert len(middle) > 20
    assert {row[2] for row in middle} <= set(range(100, 142))
    assert (0.1, 2, 100 + 34 + 30 + 5, True) in table(found), "back, with what it had"


def test_steps_with_a_prompt_of_unknown_length_are_left_out():
    known = record(0, 0.0, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 50)
    unknown = record(1, 0.0, [1.0, 1.1, 1.2], None)
    assert sorted(table(observations([known, unknown]))) == [
        (0.1, 1, 53, True),
        (0.1, 1, 54, True),
        (0.1, 1, 55, True),
    ]


@pytest.mark.parametrize("records", [[], [record(0, 0.0, [], 5)], [record(0, 0.0, [1.0], 5)]])
def test_nothing_is_seen_where_nothing_decoded(records):
    assert len(observations(records)) == 0


def test_groups_stay_apart_when_runs_are_joined():
    run = [record(0, 0.0, [1.0, 1.1, 1.2, 1.3], 50)]
    joined = join([observations(run, blocks=1), observations(run, blocks=3), observations([])])
    assert joined.group.tolist() == [0, 0, 0, 1, 2, 3]
    assert len(join([])) == 0


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.builds(Sequence, st.integers(0, 30), st.integers(1, 300), st.integers(1, 25)),
        min_size=1,
        max_size=8,
    )
)
def test_every_step_is_seen_as_the_engine_ran_it(requests):
    """Without noise a step lasts exactly what its batch and its resident tokens cost."""
    parts = {"fixed_s": 0.05, "per_sequence_s": 0.001, "per_kv_token_s": 1e-5}
    found = observations(decode(requests, prefill_s=0.001, **parts))
    expected_s = 0.05 + 0.001 * found.sequences + 1e-5 * found.resident_tokens
    np.testing.assert_allclose(found.step_s, expected_s, rtol=1e-9)
