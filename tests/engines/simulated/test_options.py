"""How the simulated engine reads its command line."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.engines.simulated.options import Settings, flag_of, parse
from kvtune.engines.simulated.server import main
from kvtune.policies.base import policies


def test_values_are_read_as_vllm_reads_them() -> None:
    words = (
        "--model m --kv-cache-memory-bytes 64M --max-model-len 2k --max-num-batched-tokens=4K "
        "--no-enable-prefix-caching --enforce-eager --watermark 0.05 --simulate-noise 1e-2"
    )
    settings, problems = parse(words.split())
    assert problems == ()
    assert settings.kv_cache_memory_bytes == 64 * 1024**2
    assert settings.max_model_len == 2000
    assert settings.token_budget == 4096
    assert settings.enable_prefix_caching is False
    assert settings.enforce_eager is True
    assert settings.watermark == 0.05
    assert settings.simulate_noise == 0.01


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--max-num-seq 4", "unrecognized arguments: --max-num-seq (did you mean --max-num-seqs?)"),
        ("--qqqqq 4 5 --enforce-eager", "unrecognized arguments: --qqqqq"),
        ("--block-size many", "argument --block-size: 'many' is not a whole number"),
        ("--block-size 0", "argument --block-size: '0' is not a whole number of at least 1"),
        ("--watermark -0.5", "argument --watermark: '-0.5' is not a number of at least 0"),
        ("--watermark 1.5", "argument --watermark: '1.5' is not a share from 0 to 1"),
        ("--kv-cache-dtype fp7", "argument --kv-cache-dtype: 'fp7' is not one of auto, "),
        ("--block-size --enforce-eager", "argument --block-size: expected one argument"),
        ("--no-block-size", "unrecognized arguments: --no-block-size"),
    ],
)
def test_each_problem_is_named_with_its_option(words: str, problem: str) -> None:
    _, problems = parse(words.split())
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_every_problem_is_named_not_only_the_first() -> None:
    problems = SimulatedEngine().check_arguments({"block-size": "x", "enforce-eagre": True}, "m")
    assert len(problems) == 2


def test_arguments_that_the_engine_takes_have_no_problem() -> None:
    arguments = {"block-size": 64, "enable-prefix-caching": False, "kv-cache-memory-bytes": "64M"}
    assert SimulatedEngine().check_arguments(arguments, "m") == ()


def test_what_kvtune_sets_itself_is_a_problem() -> None:
    assert SimulatedEngine().check_arguments({"port": 1}, "m") == (
        "--port is set by kvtune itself",
    )


def test_every_lever_is_an_option() -> None:
    known = {flag_of(option.name) for option in fields(Settings)}
    levers = {f"--{name}" for policy in policies().values() for name in policy.arguments}
    # Its layers are all alike and it has no plugin, so that policies do not offer these there.
    of_plugin = {name for name in levers if name.startswith("--additional-config.kvtune.")}
    assert levers - known - of_plugin == {"--kv-cache-dtype-skip-layers"}


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [flag_of(o.name) for o in fields(Settings)]
    assert "  --simulate-error-rate (0.0): share of requests that get HTTP 500" in lines


def test_the_defaults_depend_on_each_other_as_in_vllm() -> None:
    def both(words: str) -> tuple[int, int]:
        settings, _ = parse(words.split())
        return settings.token_budget, settings.batch_width

    assert both("") == (2048, 128)
    assert both("--max-num-batched-tokens 64") == (64, 64)
    assert both("--max-model-len 100 --max-num-seqs 4") == (400, 4)
    assert both("--no-enable-chunked-prefill --max-model-len 4096") == (4096, 128)
