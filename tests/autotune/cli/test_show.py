"""`kvtune show`: everything that is known about a study or a trial."""

import json
import math

import pytest
from contracts.store_values import a_quality_report, a_study, a_trial, measure, ok
from contracts.studies import add, measured

from kvtune.autotune.ledger import RUNG_REPEAT
from kvtune.store.database import open_store
from kvtune.store.rows import QualityReportRow, StudyRow, TrialRow
from kvtune.types import (
    Boundary,
    Decision,
    EffectiveConfig,
    Goal,
    Harm,
    LoadLevel,
    NegativeSample,
    Price,
    Slo,
    Status,
)


def test_a_study_shows_its_trials_its_decision_and_why_the_others_are_out(after_search, kvtune):
    said = kvtune("show", after_search.study).out
    assert f"{after_search.study}: org/tiny on " in said
    assert "goal: max goodput where p95 ttft <= 2s" in said
    rows = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == list("01234567")
    assert rows[0][1:4] == ["stock", "defaults", "ok"]
    assert rows[4][1:4] == ["confirms", "0", "ok"]
    winner = after_search.decision["recommended"]
    assert f"Recommended: trial {winner}: block-size 32" in said
    others = sorted({1, 2, 3} - {winner})
    assert f"- trials {others[0]}, {others[1]} out: not among those that were confirmed" in said


def test_a_study_shows_what_its_goal_limits_and_who_misses_it(kvtune):
    goal = Goal(slos=(Slo(metric="e2e", statistic="p99", limit_s=9.0),))
    with open_store() as history:
        study = a_study(history, goal=goal)
        for number, e2e_s in enumerate((8.1, 9.9)):
            metrics = {
                "goodput_requests_per_s": (2.0,),
                "ttft_p95_s": (3.3,),
                "e2e_p99_s": (e2e_s,),
            }
            add(
                history,
                study,
                number,
                {"a": number} if number else {},
                measured(1, metrics=metrics),
            )
    said = kvtune("show", study.name).out
    rows = [line.split() for line in said.splitlines() if line[:1].isdigit()]
    assert [row[-3:] for row in rows] == [["ok", "2", "8.1"], ["misses", "2", "9.9"]]
    assert "p99 E2E" in said
    assert "TTFT" not in said


def test_without_limits_a_study_shows_the_first_token_and_the_gaps(kvtune):
    with open_store() as history:
        study = a_study(history, goal=Goal())
        add(history, study, 0, {}, measured(2.0, ttft_s=99.0))
    said = kvtune("show", study.name).out
    assert "p95 TTFT" in said
    assert "p95 ITL" in said
    assert [line.split()[-4:] for line in said.splitlines() if line[:1] == "0"] == [
        ["ok", "2", "99", "-"]
    ]


def test_a_study_as_json_holds_valid_rows(after_search, kvtune):
    shown = kvtune("show", after_search.study, "--json").json()
    assert StudyRow.model_validate(shown["study"]).name == after_search.study
    trials = [TrialRow.model_validate_json(json.dumps(row)) for row in shown["trials"]]
    assert [trial.number for trial in trials] == list(range(8))
    assert (
        Decision.model_validate_json(json.dumps(shown["decision"])).model_dump(mode="json")
        == after_search.decision
    )


def test_a_trial_shows_its_settings_with_reasons_figures_and_what_ran(after_search, kvtune):
    winner = after_search.decision["recommended"]
    said = kvtune("show", f"{after_search.study}/{winner}").out
    assert f"{after_search.study}/{winner}: block-size 32" in said
    assert "block-size: 32  blocks of 32 tokens" in said
    assert "max-model-len: 2048  given for every trial" in said
    assert "goodput_requests_per_s: " in said
    assert "block_size_tokens: 32" in said
    assert "outputs: " in said
    assert ": finished" in said


def test_a_confirmation_says_what_it_confirms(after_search, kvtune):
    assert "measures trial 0 again, to confirm it" in kvtune("show", f"{after_search.study}/4").out


def test_a_repeat_of_the_search_is_no_confirmation(kvtune):
    with open_store() as history:
        study = a_study(history)
        add(history, study, 0, {}, measured(1.0))
        add(history, study, 1, {}, measured(1.1), parent=0, seed=1000, rung=RUNG_REPEAT)
    assert "repeats 0" in kvtune("show", study.name).out
    assert "measures trial 0 again\n" in kvtune("show", f"{study.name}/1").out


def test_a_trial_as_json_is_a_valid_row(after_search, kvtune):
    shown = kvtune("show", f"{after_search.study}/1", "--json").json()
    assert shown.pop("quality") == []
    row = TrialRow.model_validate_json(json.dumps(shown))
    assert row.number == 1
    assert row.measurement.effective.max_model_len_tokens == 2048
    assert row.measurement.outputs.answers == row.measurement.requests_per_repeat


def test_what_the_suites_found_is_shown_with_the_study_and_the_trial(kvtune):
    sample = NegativeSample(
        suite="needle", category="single", item="n", asked="?", candidate="x", baseline="y"
    )
    report = a_quality_report(size="screen", samples=(sample,))
    with open_store() as history:
        study = a_study(history)
        measure(history, study, a_trial(), ok())
        id_ = history.save_quality_report(report, study=study, trial=0)
        history.save_quality_report(report)
    line = (
        "- trial 0 fail: quality, screen size: worse than allowed: needle/single recall, -25pt "
        f"(-50 to -12), limit 5pt (kvtune history quality {id_[:8]})"
    )
    for reference in (study.name, f"{study.name}/0"):
        lines = kvtune("show", reference).out.splitlines()
        assert [one for one in lines if one.startswith("- trial 0")] == [line]
    (row,) = kvtune("show", f"{study.name}/0", "--json").json()["quality"]
    assert QualityReportRow.model_validate_json(json.dumps(row)).report == report
    (row,) = kvtune("show", study.name, "--json").json()["quality"]
    short = QualityReportRow.model_validate_json(json.dumps(row)).report
    assert short == report.model_copy(update={"samples": ()})


def test_a_study_shows_what_each_step_of_harm_bought(kvtune):
    said = "L2, trial 1 (kv-cache-dtype fp8): goodput +18% over stock; costs [not proven]"
    price = Price(
        rung="L2", harm=Harm.NEAR_LOSSLESS, trial=1, settings="fp8", value=2.0, over=0, says=said
    )
    with open_store() as history:
        study = a_study(history)
        measure(history, study, a_trial(), ok())
        decision = Decision(outcome="keep-baseline", recommended=0, baseline=0, prices=(price,))
        history.save_decision(study, decision)
    assert f"- {said}" in kvtune("show", study.name).out


def strictly(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("command", ["show", "report"])
def test_figures_that_are_no_number_are_null_for_programs(command, kvtune):
    with open_store() as history:
        study = a_study(history)
        found = ok().model_copy(update={"metrics": {"ttft_p95_s": (math.nan, 1.0, math.inf)}})
        measure(history, study, a_trial(), found)
    assert strictly(kvtune(command, study.name, "--json").out)
    shown = strictly(kvtune("show", f"{study.name}/0", "--json").out)
    assert shown["measurement"]["metrics"]["ttft_p95_s"] == [None, 1.0, None]


def test_a_trial_that_was_given_up_early_says_so_before_its_figures(kvtune):
    said = "cut after 45% of its requests: at most 0.71x of trial 1"
    with open_store() as history:
        study = a_study(history)
        measure(
            history,
            study,
            a_trial(),
            ok().model_copy(update={"status": Status.CUT, "share": 0.45, "cut": said}),
        )
    shown = kvtune("show", f"{study.name}/0").out
    assert shown.index(f"{said}; until then:") < shown.index("goodput_requests_per_s")


def test_a_trial_at_its_boundary_says_which_load_holds_and_what_came_of_each(kvtune):
    levels = (
        LoadLevel(load=16, violation=math.log(1.6), worst="p95 ttft <= 1s"),
        LoadLevel(load=12, violation=math.log(0.8), worst="p95 ttft <= 1s"),
        LoadLevel(load=37, violation=None, worst=None),
    )
    found = ok().model_copy(
        update={
            "metrics": {
                "boundary_low": (12.0,),
                "boundary_high": (16.0,),
                "boundary_load": (14.2,),
            },
            "boundary": Boundary(unit="requests in flight", levels=levels),
        }
    )
    with open_store() as history:
        study = a_study(history)
        measure(history, study, a_trial(), found)
    lines = [line.strip() for line in kvtune("show", f"{study.name}/0").out.splitlines()]
    at = lines.index(
        "holds up to 14 requests in flight (12 to 16); what limits it is p95 ttft <= 1s"
    )
    assert lines[at + 1 : at + 4] == [
        "holds 12 requests in flight: 80% of the limit, p95 ttft <= 1s",
        "fails 16 requests in flight: 160% of the limit, p95 ttft <= 1s",
        "fails 37 requests in flight: requests timed out",
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("live", "that of the trial before, changed while it ran"),
        ("narrowed", "started with stock sizes and changed before its load"),
        ("warm", "forked from a process that had the engine loaded"),
    ],
)
def test_how_a_server_came_to_run_is_told_in_words(kind, said, kvtune):
    with open_store() as history:
        study = a_study(history)
        add(history, study, 0, {}, measured(1.0, effective=EffectiveConfig(start_kind=kind)))
    assert f"start_kind: {kind} ({said}" in kvtune("show", f"{study.name}/0").out


def test_the_start_of_a_name_is_enough(after_search, kvtune):
    assert after_search.study in kvtune("show", after_search.study[:-1]).out


@pytest.mark.parametrize(
    ("reference", "message"),
    [("nope", "there is no study named 'nope'"), ("{}/99", "has no trial 99"), ("{}/x", "'x'")],
)
def test_what_is_not_there_is_bad_input(reference, message, after_search, kvtune):
    said = kvtune("show", reference.format(after_search.study), code=2)
    assert message in said.err
    assert "fix: " in said.err


def test_an_empty_history_says_how_to_begin(kvtune):
    assert "there are no studies" in kvtune("show", code=2).err
