"""`kvtune search`: one command from a workload to a decision."""

import json
import time

import pytest

from kvtune.autotune import space
from kvtune.autotune.cli.console import TerminalReporter
from kvtune.autotune.exclusive import only_search_of
from kvtune.types import Decision, Outcome


def test_a_search_finds_the_block_size_that_fits_and_says_so_in_json(after_search):
    decision = Decision.model_validate(after_search.decision)
    assert decision.outcome is Outcome.WINNER
    assert decision.baseline == 0
    assert decision.gain_ratio.low > 1
    assert decision.figures["goodput_requests_per_s"].repeats == 2


def test_the_same_command_measures_nothing_again(after_search, kvtune):
    again = kvtune(*after_search.words, "--json")
    assert again.json() == after_search.decision
    known = again.err.count("known, not measured again")
    assert known == 1 + 4, "the defaults and two rounds of two; the rest is not even proposed"


def test_the_decision_is_shown_with_figures_and_the_next_command(after_search, kvtune):
    said = kvtune(*after_search.words).out
    number = after_search.decision["recommended"]
    assert f"Winner - study {after_search.study}" in said
    assert f"Recommended: trial {number}: block-size 32" in said
    assert "goodput is 1." in said
    assert f"Next: kvtune emit --format vllm-yaml -o DIRECTORY --study {after_search.study}" in said


@pytest.mark.parametrize("columns", ["80", "120"])
def test_tables_keep_within_the_terminal(columns, after_search, kvtune, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    said = kvtune(*after_search.words).out
    table = [line for line in said.splitlines() if line.startswith(("goodput_", "ttft_", "itl_"))]
    assert len(table) >= 5, "each figure is a line of its own"
    assert all(len(line.rstrip()) <= int(columns) for line in table)


def test_a_goal_that_nothing_meets_is_exit_code_1(after_search, kvtune):
    words = [word if word != "p95 ttft <= 2s" else "p95 ttft <= 1us" for word in after_search.words]
    said = kvtune(*words, "--budget", 1, code=1)
    assert "Infeasible" in said.out
    assert "Closest: trial 0: stock defaults" in said.out
    assert "p95 ttft <= 1us is missed" in said.out
    assert "Next: kvtune show " in said.out
    assert "emit" not in said.out


def test_servers_that_never_start_are_exit_code_3_with_the_reason(after_search, kvtune):
    words = [*after_search.words, "--kv-memory", "32MiB", "--study", "small", "--budget", 2]
    said = kvtune(*words, code=3)
    assert "Nothing was measured" in said.out
    assert "Next: kvtune show small" in said.out
    assert "- the stock defaults: does-not-fit: " in said.out
    assert "- fix: " in said.out
    assert "does-not-fit: " in said.err
    assert "does-not-fit: " in kvtune("show", "small").out
    assert "nothing" in kvtune("emit", "--study", "small", code=2).err


def test_an_interrupt_keeps_the_best_so_far_and_is_exit_code_130(after_search, kvtune, monkeypatch):
    replays = []

    def load(self, progress):
        replays.extend([progress] if progress.done == progress.total else [])
        if len(replays) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TerminalReporter, "load", load)
    said = kvtune(*after_search.words, "--seed", 5, "--json", code=130)
    assert Decision.model_validate_json(said.out).recommended == 0
    assert "Interrupted: deciding with what was measured" in said.err


def test_a_dry_run_names_the_space_and_begins_no_study(after_search, kvtune, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTUNE_HOME", str(tmp_path / "new"))
    said = kvtune(*after_search.words, "--dry-run").out
    assert "block_size: 32, 64, 128, 256 tokens (default 128)" in said
    why = "it is near-lossless, and this search is lossless"
    (harmful,) = [line for line in said.splitlines() if why in line]
    assert "kv_dtype" in harmful
    assert "max_num_seqs: max-num-seqs is fixed by --engine-args" in said
    assert kvtune("history", "--json").json() == []


def test_a_dry_run_knows_how_many_requests_will_be_in_flight(after_search, kvtune):
    words = ("search", "--engine", "simulated", "--model", "org/tiny", "--dry-run")
    said = kvtune(*words, "--workload", after_search.workload, "--concurrency", 8).out
    assert "the load never has more than 8 requests in flight" in said


def test_a_boundary_is_only_looked_for_where_a_limit_can_be_missed(after_search, kvtune):
    words = ("search", "--engine", "simulated", "--model", "org/tiny", "--dry-run")
    words += ("--workload", after_search.workload, "--concurrency", 8, "--load-at", "boundary")
    said = kvtune(*words, "--goal", "p95 ttft <= 2s").out
    assert "in flight" not in said, "the load is not known yet"
    said = kvtune(*words, code=2).err
    assert "the highest load that keeps limits, and there are none" in said
    assert "give a limit" in said


@pytest.mark.parametrize(
    ("asked", "most"),
    [((), None), (("--max-host-memory", 0), 0), (("--max-host-memory", "8GiB"), 8 << 30)],
)
def test_what_policies_may_ask_about_says_how_much_host_memory_a_setting_may_take(
    asked, most, after_search, kvtune, monkeypatch
):
    seen, build_space = [], space.build_space

    def noted(ctx, *, harm):
        seen.append(ctx.max_host_bytes)
        return build_space(ctx, harm=harm)

    monkeypatch.setattr(space, "build_space", noted)
    kvtune(*after_search.words, *asked, "--dry-run")
    assert seen == [most]


def test_a_search_may_be_lossy(after_search, kvtune):
    words = [word for word in after_search.words if word not in ("--max-harm", "lossless")]
    said = kvtune(*words, "--max-harm", "lossy", "--dry-run").out
    assert "kv_cache_dtype: auto, fp8, fp8_e5m2" in said


BAD = {
    "a goal that is none": (["--goal", "banana"], "'banana' is not a limit"),
    "a time without a unit": (["--budget-time", "5"], "'5' is not a time"),
    "a harm that is none": (["--max-harm", "some"], "--max-harm 'some' is not known"),
    "memory that is no size": (["--max-host-memory", "much"], "'much' is not a size"),
    "a loss that is none": (["--enough", "2"], "--enough '2' is not a share"),
    "a load that is none": (["--load-at", "x"], "--load-at 'x' is not known"),
    "a sampler that is none": (["--sampler", "x"], "--sampler 'x' is not known"),
    "an objective that is none": (["--also", "x"], "--also 'x' is not known"),
    "quality where nothing is asked": (
        ["--also", "quality", "--no-quality", "--max-harm", "near-lossless"],
        "--also quality cannot be measured where no questions are asked",
    ),
    "quality of what all answers alike": (
        ["--also", "quality"],
        "lossless settings all answer as stock ones do",
    ),
    "memory that no setting changes": (
        ["--also", "memory"],
        "--also memory cannot be measured here: no setting that is searched changes it: "
        "kv-cache-memory-bytes is fixed by --engine-args and sizes the pool",
    ),
    "a workload that is not there": (["--workload", "nope.jsonl"], "there is no file nope.jsonl"),
    "a format that is none": (["--workload-format", "x"], "there is no trace format 'x'"),
    "an engine that is none": (["--engine", "x"], "there is no engine 'x'"),
    "a model that is not there": (["--model", "./nope"], "the model path ./nope does not exist"),
    "memory that is none": (["--kv-memory", "much"], "'much' is not a size"),
    "memory given twice": (
        ["--engine-args", "--kv-cache-memory-bytes 1G"],
        "the KV memory is given twice",
    ),
    "a quality limit that is none": (["--quality", "banana"], "'banana' is not a quality limit"),
    "a quality limit on nothing": (
        ["--quality", "neeedle >= -1pt"],
        "unknown suite or metric 'neeedle'",
    ),
    "a quality limit the wrong way round": (
        ["--quality", "kl >= 0.02"],
        "kl is lower when better, got '>='",
    ),
    "a quality limit on a category that is not asked": (
        ["--quality", "needle/multikey >= -1pt"],
        "needle has no category 'multikey' at standard size",
    ),
    "a quality limit that the context leaves nothing for": (
        ["--quality", "fidelity/1k-2k.kl <= 0.02", "--engine-args", "--max-model-len 1k"],
        "no item of it fits a context of 1000 tokens",
    ),
    "a quality limit on the user's own data": (
        ["--quality", "yours >= -1pt"],
        "unknown suite or metric 'yours'",
    ),
    "quality limits that contradict": (
        ["--quality", "needle >= -1pt", "--quality", "needle >= -2pt"],
        "two limits for the same",
    ),
    "a quality size that is none": (["--quality-size", "huge"], "there is no size 'huge'"),
    "own questions that are not there": (["--quality-data", "nowhere.jsonl"], "nowhere.jsonl"),
    "limits that nothing is held against": (
        ["--quality", "needle >= -1pt", "--no-quality"],
        "--no-quality asks nothing that --quality could be held against",
    ),
    "another quality in the same study": (
        ["--study", "STUDY", "--quality", "needle >= -1pt"],
        "is about another",
    ),
    "an option that the engine lacks": (
        ["--engine-args", "--blok-size 32"],
        "unrecognized arguments: --blok-size (did you mean --block-size?)",
    ),
    "an option that kvtune sets": (["--engine-args", "--port 1"], "--port is set by kvtune itself"),
    "a share that is none": (["--heldout-share", "1.5"], "the held-out share must be"),
    "a study of something else": (["--study", "STUDY", "--seed", "9"], "is about another"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_starts(case, after_search, kvtune):
    words, message = BAD[case]
    words = [after_search.study if word == "STUDY" else word for word in words]
    said = kvtune(*after_search.words, *words, code=2)
    assert said.err.startswith("error: "), "nothing was begun before the refusal"
    assert message in said.err
    assert said.out == ""


def test_the_rules_on_quality_are_settings_of_the_study(after_search, kvtune):
    words = [*after_search.words, "--budget", 1, "--study"]
    limits = ("--quality", "worst-instruction >= -2pt and kl <= 0.02", "--quality-size", "screen")
    kvtune(*words, "strict", *limits, code=0)
    kvtune(*words, "off", "--no-quality", code=0)
    kept = {
        name: kvtune("show", name, "--json").json()["study"]["settings"].get("quality")
        for name in (after_search.study, "strict", "off")
    }
    assert kept == {
        after_search.study: {"limits": [], "size": "standard"},
        "strict": {
            "limits": ["fidelity.kl <= 0.02nats", "instructions.followed >= -2pt"],
            "size": "screen",
        },
        "off": None,
    }


def test_a_search_without_quality_says_what_looks_at_answers(after_search, kvtune):
    words = [word for word in after_search.words if word not in ("--max-harm", "lossless")]
    said = kvtune(*words, "--no-quality", "--budget", 1, "--study", "near").err
    assert "no questions of quality are asked (--no-quality)" in said
    assert "no questions" not in kvtune(*after_search.words, "--no-quality", "--budget", 1).err


def test_a_study_that_is_being_searched_is_refused(after_search, kvtune):
    with only_search_of(after_search.study, after_search.home / "logs" / after_search.study):
        said = kvtune(*after_search.words, code=2)
    assert f"study {after_search.study} is being searched already" in said.err


@pytest.mark.parametrize("command", ["search", "profile"])
def test_logs_that_cannot_be_kept_are_exit_code_3(command, kvtune, tmp_path):
    workload = tmp_path / "w.jsonl"
    kvtune("workload", "make", "--requests", 8, "-o", workload)
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "logs").write_text("no directory")
    words = (command, "--engine", "simulated", "--model", "org/tiny")
    said = kvtune(*words, "--workload", workload, code=3)
    assert f"cannot be kept in {tmp_path}/home/logs" in said.err


@pytest.mark.parametrize(("option", "seconds"), [("--stall-timeout", 1), ("--request-timeout", 1)])
def test_how_long_a_server_may_be_silent_is_the_users_choice(option, seconds, kvtune, tmp_path):
    workload = tmp_path / "w.jsonl"
    kvtune("workload", "make", "--requests", 8, "-o", workload)
    words = ("profile", "--engine", "simulated", "--model", "org/tiny", "--workload", workload)
    began_s = time.monotonic()
    slow = ("--engine-args", "--simulate-hang-after-requests 7 --simulate-time-scale 0.01")
    said = kvtune(*words, *slow, option, seconds, code=3)
    assert f" {seconds} s" in said.err
    assert time.monotonic() - began_s < 30


def test_a_bad_line_of_a_workload_is_named(kvtune, tmp_path):
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    words = ("search", "--engine", "simulated", "--model", "m", "--workload", workload)
    assert f"error: {workload}, line 2: " in kvtune(*words, code=2).err


def test_an_error_is_json_where_json_is_asked_for(after_search, kvtune):
    said = kvtune(*after_search.words, "--goal", "banana", "--json", code=2)
    assert said.err == ""
    assert json.loads(said.out) == {
        "error": "'banana' is not a limit",
        "fix": 'write it like "p95 ttft <= 800ms", a whole goal like "max goodput where '
        'p95 ttft <= 800ms"',
        "kind": "BadGoal",
    }


@pytest.mark.parametrize("words", [["--budget", "0"], ["--confirm-rounds", "1"], ["--nope"]])
def test_a_value_out_of_range_is_bad_input(words, after_search, kvtune):
    assert "Usage: kvtune search" in kvtune(*after_search.words, *words, code=2).err
