"""Logs of real vLLM 0.32 servers that failed (in `logs/`, middle frames of tracebacks cut out)."""

from pathlib import Path

import pytest

from kvtune.engines.vllm.failures import FATAL_LINE, classify
from kvtune.types import FailureClass

LOGS = Path(__file__).with_name("logs")
AT_START = {
    "unknown-flag": (FailureClass.BAD_ARGUMENT, "unrecognized arguments: --no-such-flag", "--help"),
    "bad-value": (
        FailureClass.BAD_ARGUMENT,
        "--max-num-seqs: invalid int value: 'abc'",
        "argument",
    ),
    "block-size-16": (FailureClass.BAD_ARGUMENT, "No common block size for 16", "than 16;"),
    "batch-smaller-than-context": (
        FailureClass.BAD_ARGUMENT,
        "max_num_batched_tokens (64) is smaller than max_model_len (8192)",
        "arguments that the message names",
    ),
    "context-too-long": (FailureClass.BAD_ARGUMENT, "max_model_len (100000)", "arguments"),
    "kv-cache-too-small": (
        FailureClass.DOES_NOT_FIT,
        "ValueError: To serve at least one request with the model's max seq len (2048)",
        "--max-model-len 128 or less",
    ),
    "memory-share-too-large": (
        FailureClass.DOES_NOT_FIT,
        "Available memory on node 0 (7.97/9.84 GiB)",
        "Lower --gpu-memory-utilization",
    ),
    "model-path-missing": (FailureClass.WRONG_MODEL, "'/models/nope'", "config.json"),
    "folder-without-model": (FailureClass.WRONG_MODEL, "'/models'", "config.json"),
    "weights-missing": (FailureClass.WRONG_MODEL, "any model weights with `/models", "not whole"),
    "weights-cut-short": (FailureClass.WRONG_MODEL, "deserializing header: incomp", "not whole"),
    "config-broken": (FailureClass.WRONG_MODEL, "config.json' is not a valid JSON", "not whole"),
    "port-taken": (FailureClass.PORT_TAKEN, "Address already in use", "port"),
}


def read(name):
    return (LOGS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", AT_START)
def test_a_failed_start_is_told_by_its_class_its_cause_and_what_to_do(name):
    failure_class, cause, fix = AT_START[name]
    failure = classify(read(name), returncode=1, phase="start")
    assert failure.failure is failure_class
    assert cause in failure.message
    assert fix in failure.fix
    lines = failure.log_excerpt.split("\n")
    assert any(cause in line for line in lines)
    assert len(lines) <= 15
    # What vLLM prefixes, and what says nothing, is gone.
    assert not any("pid=" in line or "INFO" in line or line.startswith("  File") for line in lines)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("engine-core-killed", "engine core exited unexpectedly"),
        ("worker-killed", "Worker proc VllmWorker-0 died unexpectedly"),
    ],
)
def test_an_engine_that_dies_under_load_is_a_crash_although_the_server_exits_with_0(name, cause):
    failure = classify(read(name), returncode=0, phase="load")
    assert failure.failure is FailureClass.CRASH_UNDER_LOAD
    assert cause in failure.message
    assert cause in failure.log_excerpt
    assert any(FATAL_LINE.search(line) for line in read(name).split("\n"))


def test_a_server_that_was_killed_is_out_of_memory_and_not_blamed_on_its_children():
    failure = classify(read("api-server-killed"), returncode=-9, phase="load")
    assert failure.failure is FailureClass.OUT_OF_MEMORY
    assert "SIGKILL" in failure.message


@pytest.mark.parametrize("status", [-9, 137])
def test_a_kill_without_a_word_is_out_of_memory(status):
    assert classify("", returncode=status, phase="start").failure is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
            "total capacity of 79.25 GiB of which 15.25 MiB is free.",
            FailureClass.OUT_OF_MEMORY,
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out-of-memory"),
        ("MemoryError", "out-of-memory"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine",
            "does-not-fit",
        ),
        (
            "ValueError: Free memory on device cuda:0 (10.5/79.25 GiB) on startup is less than "
            "desired GPU memory utilization (0.92, 72.9 GiB).",
            "does-not-fit",
        ),
        (
            "ValueError: Selected backend AttentionBackendEnum.FLASH_ATTN is not valid for this "
            "configuration. Reason: ['kv_cache_dtype not supported']",
            "bad-argument",
        ),
        (
            "OSError: /models/x does not appear to have a file named config.json.",
            "wrong-model",
        ),
        ("  Value error, Model architectures ['X'] are not supported for now.", "wrong-model"),
    ],
)
def test_messages_of_the_sources_that_no_run_here_could_produce(line, failure_class):
    log = f"(EngineCore pid=7) ERROR 11-29 17:03:19 [core.py:1510] {line}\n"
    failure = classify(log, returncode=1, phase="start")
    assert failure.failure == failure_class
    assert failure.fix


def test_a_harmless_line_that_speaks_of_memory_is_no_cause():
    log = (
        "(APIServer pid=1) INFO 11-29 17:03:19 [x.py:1] set this to avoid CUDA out of memory\n"
        "ZeroDivisionError: division by zero\n"
    )
    failure = classify(log, returncode=1, phase="start")
    assert failure.failure is FailureClass.CRASH_AT_START
    assert failure.message == "ZeroDivisionError: division by zero"


def test_a_crash_without_any_words_says_how_it_ended():
    segfault = classify("", returncode=-11, phase="load")
    assert segfault.failure is FailureClass.CRASH_UNDER_LOAD
    assert "signal 11 (Segmentation fault)" in segfault.message
    assert "status 3" in classify("", returncode=3, phase="start").message


def test_a_hang_is_told_apart_from_the_error_that_caused_it():
    hang = classify("loading weights\n", returncode=None, phase="start", hang="not ready after 5 s")
    assert hang.failure is FailureClass.HANG_AT_START
    assert hang.message == "not ready after 5 s"
    assert "loading weights" in hang.log_excerpt
    under_load = classify("", returncode=None, phase="load", hang="no answer")
    assert under_load.failure is FailureClass.HANG_UNDER_LOAD
    caused = classify("MemoryError\n", returncode=None, phase="start", hang="not ready after 5 s")
    assert caused.failure is FailureClass.OUT_OF_MEMORY


def test_colours_and_progress_bars_do_not_hide_the_cause():
    log = "\x1b[1;31mLoading:  10%\rLoading: 20%\rMemoryError\x1b[0m\n"
    assert classify(log, returncode=1, phase="start").message == "MemoryError"


def test_what_kvtunes_own_plugin_refuses_comes_with_its_own_fix():
    log = (
        "INFO 11-30 17:03:19 [plugins.py:10] Available plugins\n"
        "kvtune: the plugin cannot serve this: it was never tried with tensor parallelism. "
        "To fix: set --tensor-parallel-size 1.\n"
    )
    failure = classify(log, returncode=1, phase="start")
    assert failure.failure is FailureClass.BAD_ARGUMENT
    assert "never tried with tensor parallelism" in failure.message
    assert failure.fix == "set --tensor-parallel-size 1"


def test_what_kvtunes_own_plugin_refuses_in_a_worker_is_no_crash():
    prefix = "(EngineCore pid=71) ERROR 11-30 17:03:19 [core.py:1200] "
    log = (
        f"{prefix}EngineCore failed to start.\n"
        f"{prefix}Traceback (most recent call last):\n"
        f"{prefix}kvtune.errors.BadInput: tiers take 9 bytes of memory, and the KV cache leaves 8\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    failure = classify(log, returncode=1, phase="start")
    assert failure.failure is FailureClass.BAD_ARGUMENT
    assert failure.message.endswith("tiers take 9 bytes of memory, and the KV cache leaves 8")
    assert "--additional-config" in failure.fix
