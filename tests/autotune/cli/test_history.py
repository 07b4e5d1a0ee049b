"""`kvtune history`: what was measured before, here and elsewhere."""

import json

import pytest
from contracts.pages import Parsed, profile_view
from contracts.store_values import a_quality_report

from kvtune.store import open_store
from kvtune.store.rows import StudySummary


def test_studies_are_listed_with_their_goal_and_outcome(after_search, kvtune):
    said = kvtune("history").out.splitlines()
    (at,) = [i for i, line in enumerate(said) if line.startswith(after_search.study + " ")]
    assert "trials: 8 ok; best 1" in said[at]
    assert said[at].endswith(f"winner: trial {after_search.decision['recommended']}")
    assert said[at + 1].strip() == "max goodput where p95 ttft <= 2s"


def test_the_list_as_json_holds_valid_rows(after_search, kvtune):
    rows = [StudySummary.model_validate(row) for row in kvtune("history", "--json").json()]
    (row,) = [row for row in rows if row.name == after_search.study]
    assert row.trials == {"ok": 8}
    assert row.recommended == after_search.decision["recommended"]


def test_an_empty_history_says_how_to_begin(kvtune):
    assert "kvtune search --model" in kvtune("history").out
    assert kvtune("history", "--json").json() == []


def test_an_export_makes_another_store_know_the_same(after_search, kvtune, tmp_path):
    file, other = tmp_path / "all.jsonl", tmp_path / "other.db"
    assert "wrote " in kvtune("history", "export", "--study", after_search.study, "-o", file).err
    added = kvtune("history", "--store", other, "import", file, "--json").json()
    assert added["added"]["study"] == 1
    assert sum(added["skipped"].values()) == 0
    here = kvtune("show", after_search.study, "--json").json()
    assert kvtune("show", "--store", other, "--json").json() == here
    again = kvtune("history", "import", file, "--store", other)
    assert "added 0, known " in again.out


def test_an_imported_history_spares_its_measurements(after_search, kvtune, tmp_path):
    file, other = tmp_path / "all.jsonl", tmp_path / "other.db"
    kvtune("history", "export", "--study", after_search.study, "-o", file)
    kvtune("history", "import", file, "--store", other)
    again = kvtune(*after_search.words, "--store", other, "--json")
    assert again.json() == after_search.decision


def test_an_export_goes_to_stdout_without_a_file(after_search, kvtune):
    lines = kvtune("history", "export", "--study", after_search.study).out.splitlines()
    assert json.loads(lines[0])["kind"] == "kvtune-export"
    assert len(lines) > 20


def test_a_file_that_cannot_be_read_or_written_is_bad_input(after_search, kvtune, tmp_path):
    assert "cannot be read" in kvtune("history", "import", tmp_path / "nope", code=2).err
    said = kvtune("history", "export", "-o", tmp_path / "no" / "such.jsonl", code=2)
    assert "cannot be written" in said.err


def test_a_line_that_is_no_export_is_named(kvtune, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text("{}\n")
    assert "line 1" in kvtune("history", "import", file, code=2).err


def test_a_store_that_is_none_is_bad_input(kvtune):
    assert "error: " in kvtune("history", "--store", "mysql://host/db", code=2).err


def test_a_store_that_cannot_be_opened_is_exit_code_3(kvtune, tmp_path):
    (tmp_path / "file").write_text("not a database, and long enough to be looked at" * 40)
    assert "error: " in kvtune("history", "--store", tmp_path / "file", code=3).err


def test_forecasts_of_a_search_are_shown_beside_what_its_trials_measured(after_search, kvtune):
    found = kvtune("history", "forecasts", "--json").json()
    measured = [one for one in found["forecasts"] if one["measured"] is not None]
    assert {one["study"] for one in measured} == {after_search.study}
    capacity = [one for one in measured if one["metric"] == "capacity_tokens"]
    assert capacity
    for one in capacity:
        # The model is not known, so what is left over of the pool is not either.
        assert abs(one["predicted"] - one["measured"]) < 128
    by_metric = {score["metric"]: score for score in found["scores"]}
    assert by_metric["capacity_tokens"]["measured"] == len(capacity)
    said = kvtune("history", "forecasts").out
    assert f"{len(measured)} of them measured later" in said
    assert "direction right in" in said
    assert "predicted" in said


def test_forecasts_are_a_row_a_lever_within_80_columns(after_search, kvtune):
    said = kvtune("history", "forecasts").out.splitlines()
    assert all(len(line) <= 80 for line in said if "points on average" not in line)
    (head,) = [i for i, line in enumerate(said) if line.startswith("lever ")]
    assert said[head - 1] == after_search.study
    assert said[head].split() == ["lever", "KV", "tokens", "step", "first", "token", "goodput"]
    (row,) = [line for line in said if line.startswith("block-size 32 ")]
    assert row.count(" -> ") >= 3


def test_forecasts_are_written_as_a_page(after_search, kvtune, tmp_path):
    page = tmp_path / "f.html"
    kvtune("history", "forecasts", "--html", page)
    assert "Told and measured." in Parsed(page.read_text()).plots


def test_profiles_are_listed_with_their_verdicts(kvtune, tmp_path):
    assert "kvtune profile --url" in kvtune("history", "profiles").out
    assert kvtune("history", "profiles", "--json").json() == []
    view = profile_view(model="org/[bold]small")
    with open_store(tmp_path / "some.db") as store:
        id_ = store.save_profile(view.profile)
    (line,) = kvtune("history", "profiles", "--store", tmp_path / "some.db").out.splitlines()
    assert line.startswith(id_[:8])
    assert line.endswith("org/[bold]small on a processor")
    (row,) = kvtune("history", "--store", tmp_path / "some.db", "profiles", "--json").json()
    assert row["id"] == id_


def test_history_without_forecasts_says_how_they_are_measured(kvtune):
    assert "A search measures them" in kvtune("history", "forecasts").out
    assert kvtune("history", "forecasts", "--json").json() == {"forecasts": [], "scores": []}


@pytest.fixture
def reports(kvtune):
    assert "No quality reports yet" in kvtune("history", "quality").out
    with open_store() as store:
        return [
            store.save_quality_report(a_quality_report(candidate=f"--block-size {size}", **changes))
            for size, changes in ((16, {}), (32, {"outcome": "unclear"}))
        ]


def test_quality_reports_are_listed_newest_first(reports, kvtune):
    said = kvtune("history", "quality").out.splitlines()
    assert [line.split()[0] for line in said] == [reports[1][:8], reports[0][:8]]
    assert "unclear  --block-size 32 beside" in said[0]
    listed = kvtune("history", "quality", "--json").json()
    assert [row["id"] for row in listed] == reports[::-1]


def test_a_quality_report_is_shown_again(reports, kvtune, tmp_path):
    page = tmp_path / "q.html"
    done = kvtune("history", "quality", reports[0][:8], "--html", page)
    assert "6 of 24 items broke" in done.out
    assert "Surely lost more than the limit allows: needle/single recall." in done.out
    assert "--block-size 16" in page.read_text()


def test_a_quality_report_that_is_not_one_is_bad_input(reports, kvtune, tmp_path):
    assert "0 quality reports" in kvtune("history", "quality", "zz", code=2).err
    page = ("--html", tmp_path / "q.html")
    assert "2 quality reports" in kvtune("history", "quality", *page, code=2).err
