"""When a warm-up may end: steps are as fast at its end as before, as far as that can be told."""

from itertools import count

import pytest
from contracts.decoding import Sequence, decode

from kvtune.profilers.load.client import ClosedLoop
from kvtune.profilers.load.warmup import Pace, pace_of

MODEL = {"fixed_s": 0.02, "per_sequence_s": 0.001, "per_kv_token_s": 0.0}


def warmed(speed, tokens=(40, 40, 40, 40), **model):
    """Four requests that decode together; step `n` takes `speed(n)` times as long."""
    step = count()
    together = [Sequence(0, 100, length) for length in tokens]
    return decode(together, noise=lambda random: speed(next(step)), **{**MODEL, **model})


def test_steps_that_stay_as_fast_as_they_were_are_steady():
    pace = pace_of(warmed(lambda step: 1.0))
    assert (pace.before_s, pace.after_s) == pytest.approx((0.024, 0.024))
    assert pace.is_steady


@pytest.mark.parametrize("change", [0.5, 1.3])
def test_a_server_that_becomes_faster_or_slower_is_not_steady(change):
    pace = pace_of(warmed(lambda step: 1.0 if step < 20 else change))
    assert not pace.is_steady
    assert pace.after_s / pace.before_s == pytest.approx(change, rel=0.01)


def test_a_single_slow_step_is_nothing_to_wait_for():
    assert pace_of(warmed(lambda step: 50.0 if step == 1 else 1.0)).is_steady


def test_answers_that_end_one_by_one_do_not_look_like_a_server_that_becomes_faster():
    pace = pace_of(warmed(lambda step: 1.0, (20, 40, 60, 80), per_sequence_s=0.02))
    assert pace.is_steady


def test_a_long_prefill_at_first_is_no_slow_step():
    assert pace_of(warmed(lambda step: 1.0, prefill_s=0.01)).is_steady


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (4, 4, 4, 4), (12, 12, 12, 12)])
def test_nothing_is_told_from_a_handful_of_steps(tokens):
    assert pace_of(warmed(lambda step: 1.0, tokens)) is None
    assert pace_of([]) is None


def test_a_step_counts_once_however_many_decode_in_it():
    assert pace_of(warmed(lambda step: 1.0, (14, 14, 14, 14))) is not None
    assert pace_of(warmed(lambda step: 1.0, (12,) * 40)) is None


@pytest.mark.parametrize(
    ("before_s", "after_s", "steady"),
    [(0.1, 0.109, True), (0.1, 0.112, False), (0.109, 0.1, True), (0.112, 0.1, False)],
)
def test_a_tenth_more_or_less_is_still_steady(before_s, after_s, steady):
    assert Pace(before_s, after_s).is_steady is steady


@pytest.mark.parametrize(
    ("paces", "sent", "warned"),
    [
        ([Pace(0.02, 0.02)], 2, ()),
        ([None], 2, ()),
        ([Pace(0.03, 0.02), Pace(0.02, 0.02)], 4, ()),
        (
            [Pace(0.03, 0.02), Pace(0.03, 0.02), Pace(0.02, 0.03)],
            5,
            ("still unsteady after 5 warm-up requests: its steps took 20 ms, then 30 ms",),
        ),
    ],
)
def test_a_warmup_goes_on_until_it_is_steady(paces, sent, warned, http, monkeypatch):
    found = iter(paces)
    monkeypatch.setattr("kvtune.profilers.load.client.pace_of", lambda records: next(found))
    run, server = http.run_replay(
        http.three_tokens,
        http.requests(6)[5:],
        ClosedLoop(2),
        warmup=http.requests(5),
        warmup_pass=2,
    )
    prompts = [exchange.body["prompt"] for exchange in server.answered]
    # Two are in flight, in an order of their own.
    assert sorted(prompts[:-1]) == [f"p{number}" for number in range(sent)]
    assert prompts[-1] == "p5"
    assert len(run.records) == 1
    assert run.warnings == warned
    assert next(found, "all were asked") == "all were asked"
