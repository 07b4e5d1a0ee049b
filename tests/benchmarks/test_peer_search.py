"""What a search took, read from its history."""

import pytest
from contracts.studies import add, add_round, failed, measured, new_study
from peer_case import Setting, cases
from peer_search import cost, search

from kvtune.store.database import open_store
from kvtune.types import EffectiveConfig, Status

WHOLE = {"wall_s": 10.0, "stop_s": 1.0}


@pytest.fixture
def rows(tmp_path):
    def of(*trials):
        with open_store(tmp_path / "s.db") as store:
            study = new_study(store)
            for number, (arguments, found) in enumerate(trials):
                add(store, study, number, arguments, found)
            add_round(store, study, len(trials), 0, {}, measured(2.0, **WHOLE), 0)
            return store.trials(study)

    return of


def test_trials_and_their_confirmation_are_counted_apart(rows):
    cut = measured(1.0, wall_s=4.0, status=Status.CUT, share=0.3, cut="hopeless")
    found = cost(rows(({}, measured(2.0, **WHOLE)), ({"block-size": 32}, cut)))
    assert (found.tried, found.confirmed, found.cut, found.launches) == (2, 1, 1, 3)
    assert (found.tried_s, found.servers_s) == (15.0, 26.0)


def test_only_what_never_started_is_a_failed_launch(rows):
    starts = failed().model_copy(update={"wall_s": 3.0})
    dies = failed().model_copy(update={"start_s": 5.0, "wall_s": 8.0})
    found = cost(rows(({}, starts), ({"block-size": 32}, dies), ({"block-size": 64}, None)))
    assert (found.launches, found.failed_launches) == (3, 1)
    assert found.servers_s == 22.0


def test_a_server_that_was_changed_is_no_launch(rows):
    changed = measured(2.0, effective=EffectiveConfig(start_kind="live"))
    found = cost(rows(({}, measured(2.0)), ({"max-num-seqs": 8}, changed)))
    assert (found.tried, found.launches) == (2, 2)  # Stock, and its confirmation.


def test_a_search_on_a_simulated_server_is_told_with_what_it_chose(tmp_path):
    home = tmp_path / "home"
    (home / "old").mkdir(parents=True)
    setting = Setting(cases()["try"], "simulated", "simulated")
    words = ["--budget", "1", "--no-probe", "--max-harm", "lossless"]
    found = search(setting, home, seed=3, options=words)
    assert found.details["tried"] == 1
    assert found.launches == found.details["tried"] + found.details["confirmed"]
    assert (found.arguments, found.failed_launches) == ({}, 0)
    assert 0 < found.servers_s < found.wall_s
    assert len((home / "workload.jsonl").read_text().splitlines()) == 24
    assert not (home / "old").exists()
