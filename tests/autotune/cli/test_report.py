"""`kvtune report`: the page of a real search, and Optuna's own view of the same database."""

import json

import optuna
from contracts.pages import Parsed

from kvtune.autotune.report.study_page import OUTCOMES


def test_a_finished_search_becomes_one_page(after_search, kvtune, tmp_path):
    page = tmp_path / "deep" / "report.html"
    said = kvtune("report", after_search.study, "-o", page)
    assert said.err == f"wrote {page}\n"
    assert said.out == ""
    found = Parsed(page.read_text())
    assert found.texts["h1"] == [f"Study {after_search.study}"]
    outcome, _ = OUTCOMES[after_search.decision["outcome"]]
    assert found.texts["dt"][:2] == ["outcome", "recommended trial"]
    assert found.texts["dd"][:2] == [outcome, str(after_search.decision["recommended"])]
    assert "Finalists beside the stock defaults." in found.plots


def test_a_page_is_written_here_unless_it_is_told_where(
    after_search, kvtune, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    kvtune("report")
    assert (tmp_path / "report.html").is_file()


def test_as_json_nothing_is_written_unless_asked(after_search, kvtune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = kvtune("report", after_search.study, "--json").json()
    assert found["decision"] == after_search.decision
    assert list(tmp_path.glob("*.html")) == []
    kvtune("report", after_search.study, "--json", "-o", "page.html").json()
    assert (tmp_path / "page.html").is_file()


def test_a_study_that_does_not_exist_is_refused(after_search, kvtune):
    assert "there is no study named" in kvtune("report", "other", code=2).err


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(
    after_search, kvtune, tmp_path
):
    assert "cannot be written" in kvtune("report", "-o", tmp_path, code=2).err


def test_optuna_opens_the_same_database(after_search, kvtune):
    found = kvtune("report", after_search.study, "--json").json()
    study = optuna.load_study(
        study_name=after_search.study, storage=f"sqlite:///{after_search.home}/kvtune.db"
    )
    done = [trial for trial in study.trials if trial.state.is_finished()]
    values = {round(trial.value, 9) for trial in done if trial.value is not None}
    measured = {round(point["value"], 9) for point in found["points"] if point["trial"]}
    assert measured <= values
    assert json.dumps(study.best_trial.params)
