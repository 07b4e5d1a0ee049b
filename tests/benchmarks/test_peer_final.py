"""What was chosen is measured once each, in turns, and duels are told by the same rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_case import cases
from peer_final import choices, key_of, turns, values_of
from peer_log import Log
from peer_report import duel, markdown
from peers import order

METRIC = "goodput_requests_per_s"
A, B = {"block-size": 32}, {"block-size": 64, "max-num-seqs": 8}


def test_stock_comes_first_and_equal_choices_once():
    found = choices([("kvtune 1", B), ("x 1", {}), ("x 2", dict(reversed(B.items())))])
    assert [choice.arguments for choice in found] == [{}, B]
    assert [choice.by for choice in found] == [("x 1",), ("kvtune 1", "x 2")]


@given(st.integers(1, 9), st.integers(0, 20))
def test_every_round_has_each_once(number, turn):
    assert sorted(turns(number, turn)) == list(range(number))


def test_rounds_begin_with_another_and_run_both_ways():
    assert [turns(3, turn) for turn in range(3)] == [[0, 1, 2], [0, 2, 1], [2, 0, 1]]
    assert order(["a", "b"], 0) == ["kvtune", "a", "b"]
    assert order(["a", "b"], 1) == ["b", "a", "kvtune"]


def replay(log, turn, arguments, goodput, **more):
    figures = {METRIC: goodput, "ttft_p95_s": 1.0, "itl_p95_s": 0.1}
    part = {"part": "replay", "turn": turn, "key": key_of(arguments), "figures": figures}
    log.add({**part, "failure": None, **more})


def test_what_failed_reached_nothing_and_rounds_stay_in_order(tmp_path):
    log = Log(tmp_path / "log.jsonl", {})
    replay(log, 1, A, 3.0)
    replay(log, 0, A, 2.0)
    replay(log, 2, A, 0.0, figures={}, failure="it died")
    assert values_of(log, key_of(A), METRIC) == [2.0, 3.0, 0.0]


def test_a_duel_is_won_only_beyond_noise():
    assert duel([4.0, 4.1, 4.2], [2.0, 2.0, 2.1]).wins is True
    assert duel([2.0, 2.0, 2.1], [4.0, 4.1, 4.2]).wins is False
    assert duel([4.0, 2.0, 3.0], [3.0, 3.1, 3.2]).wins is None
    assert duel([4.0], [2.0]).wins is None
    # A machine that slows down for a round slows both.
    assert duel([4.0, 2.0, 1.0], [3.6, 1.82, 0.9]).ratio.estimate == pytest.approx(1.107, abs=0.01)


def test_a_duel_with_nothing_has_no_ratio_and_is_told_all_the_same():
    found = duel([4.0, 4.1, 4.2], [0.0, 0.0, 0.1])
    assert found.ratio is None
    assert found.wins is True
    assert duel([0.0, 0.0], [0.0, 0.0]).wins is None


def test_the_report_tells_what_was_lost_too(tmp_path):
    log = Log(tmp_path / "log.jsonl", {"minutes": 8.0})
    common = {"wall_s": 480.0, "launches": 20, "failed_launches": 1, "servers_s": None}
    for number, ours in enumerate((A, B, A)):
        for who, arguments in (("kvtune", ours), ("auto_tune", B)):
            part = {"part": "search", "who": who, "round": number, "arguments": arguments}
            log.add({**part, **common, "says": "9 trials"})
    for turn in range(3):
        replay(log, turn, {}, 0.5 + turn / 100)
        replay(log, turn, A, 2.0 + turn / 100)
        replay(log, turn, B, 4.0 + turn / 100)
    text = markdown(cases()["capacity"], log)
    assert "| 1 | auto_tune | 0.50x" in text
    assert text.count("| lost |") == 2
    assert text.count("| the same settings |") == 1
    assert "lost 2" in text
    assert "the same settings 1" in text
    assert "block-size 32 | kvtune 1, kvtune 3 | 2.01" in text
    assert "3 of 3" in text
