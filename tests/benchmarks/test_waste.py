"""How much of a search is wasted, on a recorded surface and on servers."""

from functools import cache
from pathlib import Path

import pytest
import surface_bench
from peer_case import cases
from peer_final import key_of
from peer_log import Log
from surface_bench import Judge, recorded_surfaces
from surface_file import read_recording
from waste import markdown
from waste_real import markdown as real_markdown
from waste_replay import WAYS, Spent, same_pick, saved, spent

SIMULATED = Path(surface_bench.__file__).parent / "surfaces" / "simulated-dear-blocks.jsonl.xz"
FIXED, CUTS, STOPS, REUSES, ADAPTIVE = WAYS
METRIC = "goodput_requests_per_s"
A, B = {"block-size": 32}, {"block-size": 64}


@cache
def surface():
    return recorded_surfaces(read_recording(SIMULATED))[1]


@cache
def once(way, trials):
    return spent(surface(), Judge(surface()), way, 0, trials)


def test_a_search_of_fixed_length_uses_up_its_budget_and_cuts_nothing():
    found = once(FIXED, 5)
    assert (found.launches, found.cut, found.failed_launches) == (5, 0, 0)
    # Each takes 6.5 s beside its load.
    assert found.servers_s > 5 * 6.5


def test_where_nothing_is_cut_both_ways_spend_the_same():
    fixed, cuts = once(FIXED, 3), once(CUTS, 3)
    assert (fixed.cut, cuts.cut) == (0, 0)
    assert (cuts.servers_s, cuts.pick) == (fixed.servers_s, fixed.pick)


def of(way, seconds, *, pick=(32,), worth=1.0, seed=0, failed=0, cut=0):
    return Spent("s", way.name, seed, pick, worth, seconds, 10, failed, cut)


def test_time_is_compared_only_where_both_found_the_same():
    fixed = of(FIXED, 100.0)
    assert same_pick(fixed, of(ADAPTIVE, 50.0))
    assert same_pick(fixed, of(ADAPTIVE, 50.0, pick=(64,), worth=0.995))
    assert not same_pick(fixed, of(ADAPTIVE, 50.0, pick=(64,), worth=0.9))
    pairs = [
        (fixed, of(ADAPTIVE, 60.0)),
        (fixed, of(ADAPTIVE, 10.0, pick=(64,), worth=0.5)),
    ]
    assert saved(pairs) == [pytest.approx(0.4)]


def test_the_table_has_the_median_of_the_seeds_and_what_failed():
    found = []
    for seed, seconds in enumerate((50.0, 60.0, 90.0)):
        found += [
            of(FIXED, 100.0, seed=seed, failed=1),
            of(ADAPTIVE, seconds, seed=seed, cut=2),
        ]
    text = markdown(found, 15)
    assert "| s | fixed | 3 of 3 |  | 100.0 | 10.0 | 10.0 | 0.0 |" in text
    assert "| s | adaptive | 3 of 3 | 40 (10 to 50) | 100.0 | 10.0 | 0.0 | 20.0 |" in text
    assert "3 of 60 launches failed: 5.00%" in text


def real(log, way, pair, arguments, servers_s, tried_s):
    details = {"tried": 15, "cut": 0, "launches": 20, "failed_launches": 0, "tried_s": tried_s}
    part = {"part": "search", "way": way, "pair": pair, "arguments": arguments}
    known = {"servers_s": servers_s, "launches": 20, "failed_launches": 1, "details": details}
    log.add({**part, **known})


def test_a_real_pair_tells_what_was_saved_and_at_what_price(tmp_path):
    log = Log(tmp_path / "log.jsonl", {})
    real(log, "fixed", 0, A, 300.0, 200.0)
    real(log, "adaptive", 0, A, 250.0, 150.0)
    real(log, "adaptive", 1, B, 200.0, 100.0)
    real(log, "fixed", 1, A, 400.0, 200.0)
    for turn in range(3):
        for arguments, goodput in ((A, 4.0), (B, 2.0)):
            figures = {METRIC: goodput + turn / 100}
            part = {"part": "replay", "turn": turn, "key": key_of(arguments), "failure": None}
            log.add({**part, "figures": figures})
    text = real_markdown(cases()["capacity"], log)
    assert "17% less server time in all, 25% less for its trials; both chose the same" in text
    assert "50% less server time in all, 50% less for its trials; it made the worse choice" in text
    assert "4 of 80 launches failed" in text
