"""`kvtune quality` as a user has it: an outcome, a table, an exit code."""

import pytest

from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput

SHORT = ("--engine-args", "--simulate-time-scale 0.02")
SIMULATED = ("quality", "--engine", "simulated", "--model", "org/tiny", "--size", "screen", *SHORT)
NEEDLE = ("--suite", "needle", "--limit", "needle/single >= -40pt", "--items", "30")


def test_the_same_configuration_passes(kvtune):
    done = kvtune(*SIMULATED, *NEEDLE, "--candidate", "--max-num-seqs 8")
    assert "pass" in done.out
    assert "stock" not in done.out  # the shared arguments are what the baseline is
    assert "--max-num-seqs 8" in done.out


def test_broken_output_fails_and_shows_both_answers(kvtune):
    done = kvtune(*SIMULATED, *NEEDLE, "--candidate", "--simulate-broken-output", code=1)
    assert "Broken now, fine with the baseline" in done.out
    assert "rursrsIner" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if line.startswith("fail  "))


def test_a_screen_that_cannot_tell_is_unclear(kvtune):
    limit = ("--suite", "needle", "--limit", "needle/single >= -1pt")
    done = kvtune(*SIMULATED, *limit, code=4)
    assert "needed" in done.out


def test_beyond_a_screen_limits_are_asked_what_proves_them_and_the_time_is_told_first(kvtune):
    words = ("quality", "--engine", "simulated", "--model", "org/tiny", *SHORT, "--suite", "needle")
    wide = ("--limit", "needle/single >= -20pt", "--limit", "broken-output <= 10pt")
    told = " ".join(kvtune(*words, *wide).err.split())
    assert "144 items are asked of the candidate, and twice of the baseline: some 4 min" in told
    assert told.index("144 items") < told.index("Starting")
    narrow = ("--limit", "needle/single >= -1pt", "--items", "3")
    told = " ".join(kvtune(*words, *narrow, code=4).err.split())
    assert "18 items are asked of the candidate" in told


def test_what_does_not_fit_the_context_is_not_counted_and_said_to_be_too_few(kvtune):
    words = ("quality", "--engine", "simulated", "--model", "org/tiny", "--suite", "needle")
    context = ("--engine-args", "--simulate-time-scale 0.02 --max-model-len 512")
    wide = ("--limit", "needle/single >= -20pt", "--limit", "broken-output <= 10pt")
    done = kvtune(*words, *context, *wide, "--json", code=4)
    told = " ".join(done.err.split())
    asked = sum(figure["items"] for figure in done.json()["figures"] if figure["suite"] == "any")
    assert f"{asked} items are asked of the candidate" in told
    assert f"and {asked} are asked: it" in told


def test_a_baseline_is_asked_once_and_again_only_when_asked_to(kvtune):
    first = kvtune(*SIMULATED, *NEEDLE)
    known = kvtune(*SIMULATED, *NEEDLE)
    fresh = kvtune(*SIMULATED, *NEEDLE, "--fresh")
    assert "asking the baseline again" in first.err
    assert "all answers are known" in known.err
    assert "asking the baseline again" in fresh.err


def test_json_is_the_report_and_a_page_is_written_beside_it(kvtune, tmp_path):
    page = tmp_path / "q.html"
    report = kvtune(*SIMULATED, *NEEDLE, "--json", "--html", page).json()
    assert report["outcome"] == "pass"
    assert report["candidate"] == "--simulate-time-scale 0.02"
    assert {figure["suite"] for figure in report["figures"]} == {"needle", "any"}
    assert "needle" in page.read_text()


def test_scores_that_the_server_does_not_give_leave_the_suite_unjudged(kvtune):
    done = kvtune(*SIMULATED, "--suite", "fidelity", code=4)
    assert "not judged: fidelity" in done.out
    assert "8 of 8 items failed" in done.out


def test_a_server_that_crashes_is_an_engine_failure(kvtune):
    done = kvtune(*SIMULATED, *NEEDLE, "--candidate", "--simulate-crash-after-requests 3", code=3)
    assert "error:" in done.err


def test_running_servers_are_compared_and_go_on_running(kvtune, tmp_path):
    def launch(name, **arguments):
        spec = ServerSpec("org/tiny", arguments={"simulate-time-scale": 0.02, **arguments})
        return SimulatedEngine().launch(spec, log_path=tmp_path / name)

    with launch("a") as good, launch("b", **{"simulate-broken-output": True}) as bad:
        words = ("quality", "--size", "screen", *NEEDLE, "--url-baseline", good.endpoint.url)
        kvtune(*words, "--url-candidate", good.endpoint.url)
        done = kvtune(*words, "--url-candidate", bad.endpoint.url, code=1)
        assert good.failure() is None
        assert bad.failure() is None
    assert bad.endpoint.url in "".join(done.out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--suite", "needles"), "did you mean needle"),
        (("--suite", "yours"), "--data"),
        (("--limit", "needle >= fast"), "needle >= -1pt"),
        (("--candidate", "--kv-cache-dtype tiny"), "refuses the candidate's arguments"),
        (("--candidate", "--hf-token x"), "secret"),
        (("--candidate", "--max-num-seqs 8", "--url-candidate", "http://h:1"), "runs already"),
        (("--reference", "--url-baseline", "http://h:1"), "--reference asks no server"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(kvtune, words, says):
    assert says in kvtune(*SIMULATED, *words, code=2).err


@pytest.mark.parametrize(
    "words",
    [
        ("quality", "--candidate", "--max-num-seqs 8"),
        ("quality", "--size", "huge", "--model", "org/tiny"),
        ("quality", "--reference", "--candidate", "snapkv"),
        ("quality", "--reference", "--model", "org/tiny", "--candidate", "snapcake"),
    ],
)
def test_what_is_missing_or_unknown_is_bad_input(kvtune, words):
    assert "error:" in kvtune(*words, code=2).err


def test_help_tells_the_exit_codes(kvtune):
    assert "4 unclear" in " ".join(kvtune("quality", "--help").out.split())


def test_help_tells_what_a_size_can_prove(kvtune):
    told = " ".join(kvtune("quality", "--help").out.replace("│", " ").split())
    assert "they can prove that not 8 to 18 points were lost" in told


@pytest.mark.parametrize(
    ("where", "protects"), [("--reference", True), ("--engine=simulated", False)]
)
def test_only_the_reference_engine_is_asked_with_parts_that_are_protected(
    kvtune, monkeypatch, where, protects
):
    plans = []

    def stop(plan, *subjects):
        plans.append(plan)
        raise BadInput("seen")

    monkeypatch.setattr("kvtune.autotune.quality.answers.fitting", stop)
    kvtune("quality", where, "--model", "org/tiny", code=2)
    assert [plan.protects for plan in plans] == [protects]
