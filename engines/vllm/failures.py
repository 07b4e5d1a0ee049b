"""Turn the log and the end of a failed server into a class, its decisive line and a fix."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

from kvtune.engines.vllm.log import plain
from kvtune.types import Failure, FailureClass

_EXCERPT_LINES = 15
_LINE_LIMIT = 500
_MESSAGE_LIMIT = 400
# "(EngineCore pid=7) ERROR 11-29 17:03:19 [core.py:1510] text"; the level and what follows it are
# absent from what is not logged but printed.
_PREFIX = re.compile(
    r"^(\([^()]*pid=\d+[^()]*\) ?)?"
    r"((?P<level>[A-Z]{4,8}) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
_QUIET_LEVELS = frozenset({"DEBUG", "INFO"})
# Frames of a traceback with the code and carets below them, Python's warnings, usage texts,
# progress bars, the HTTP server's own lines and dumps of the engine's state.
_NOISE = re.compile(
    r"^\s*$|^ {4,}|^  (File |[a-z])|^Traceback |^usage: |Warning: |\d+% Completed"
    r"|^INFO: |^Dumping |^Triton is installed"
)


@dataclass(frozen=True, slots=True)
class _Row:
    """What a log line means. Groups of `pattern` fill the braces in `fix`."""

    pattern: re.Pattern[str]
    failure: FailureClass
    fix: str


def _row(pattern: str, failure: FailureClass, fix: str) -> _Row:
    return _Row(re.compile(pattern, re.IGNORECASE), failure, fix)


_MORE_MEMORY = (
    "Give the KV cache less memory, serve a shorter context, or free memory on the device."
)
_CHANGE_ARGUMENTS = "Change the engine arguments that the message names."

# The first row that matches any line wins: root causes stand before what follows from them.
_ROWS = (
    # kvtune's own plugin, before vLLM starts anything.
    _row(r"^kvtune: .*\. To fix: (?P<fix>.+)\.$", FailureClass.BAD_ARGUMENT, "{fix}"),
    # The same in a worker, where what helps is not in the log.
    _row(
        r"^kvtune\.errors\.BadInput: ",
        FailureClass.BAD_ARGUMENT,
        "Change what kvtune's section of --additional-config asks for, by what the message says.",
    ),
    _row(
        r"estimated maximum model length is (?P<tokens>\d+)",
        FailureClass.DOES_NOT_FIT,
        "Pass --max-model-len {tokens} or less, or raise --kv-cache-memory-bytes "
        "(or --gpu-memory-utilization).",
    ),
    _row(
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        FailureClass.DOES_NOT_FIT,
        "Raise --kv-cache-memory-bytes (or --gpu-memory-utilization), or lower --max-model-len.",
    ),
    _row(
        r"Free memory on device.*less than desired|is less than desired CPU memory utilization",
        FailureClass.DOES_NOT_FIT,
        "Lower --gpu-memory-utilization, set --kv-cache-memory-bytes instead, or stop what else "
        "uses the device's memory.",
    ),
    _row(
        r"CUDA out of memory|OutOfMemoryError|std::bad_alloc|DefaultCPUAllocator: can.t allocate"
        r"|^MemoryError\b|Cannot allocate memory",
        FailureClass.OUT_OF_MEMORY,
        _MORE_MEMORY,
    ),
    _row(
        r"Address already in use|Errno 98\b",
        FailureClass.PORT_TAKEN,
        "Choose another port, or stop what listens there.",
    ),
    _row(
        r"does not appear to have a file named|Repo id must be in the form|is not a local folder"
        r"|Invalid repository ID or local directory specified|outgoing traffic has been disabled"
        r"|Can.t load the configuration of|model type .* (but|is not).*Transformers does not",
        FailureClass.WRONG_MODEL,
        "Name a folder that holds config.json and the weights, or a Hugging Face id that is "
        "downloaded (HF_HUB_OFFLINE=1 forbids downloads).",
    ),
    _row(
        r"Cannot find any model weights|Error while deserializing header|is not a valid JSON file",
        FailureClass.WRONG_MODEL,
        "The checkpoint is not whole: download it again.",
    ),
    _row(
        r"Model architectures .* (are|is) not supported|has no vLLM implementation",
        FailureClass.WRONG_MODEL,
        "Serve a model whose architecture this vLLM supports.",
    ),
    _row(
        r"error: (unrecognized arguments|ambiguous option|argument |expected )",
        FailureClass.BAD_ARGUMENT,
        "Correct the engine argument; `vllm serve --help=all` lists all of them.",
    ),
    _row(
        r"No common block size for (?P<size>\d+)",
        FailureClass.BAD_ARGUMENT,
        "Choose another --block-size than {size}; the message names what the backend takes.",
    ),
    _row(r"^\s*(Value error, |Input should be )", FailureClass.BAD_ARGUMENT, _CHANGE_ARGUMENTS),
    _row(
        r"validation errors? for \w*Config|Selected backend .* is not valid|^NotImplementedError: ",
        FailureClass.BAD_ARGUMENT,
        _CHANGE_ARGUMENTS,
    ),
    _row(
        r"EngineDeadError|engine core exited unexpectedly|EngineCore encountered a fatal error"
        r"|Engine core proc.* died|Worker proc .* died unexpectedly",
        FailureClass.CRASH_UNDER_LOAD,
        "See the log for what the engine was doing; lower its memory use if the system killed it.",
    ),
)
# The last error line of a crash that no row knows, e.g. "ValueError: ...", but not one that only
# points at another.
_ERROR_LINE = re.compile(
    r"^(?!.*(See root cause above|See stack trace for root cause))"
    r"([\w.]+(Error|Exception|Exit|Interrupt)\b|error:|fatal)",
    re.IGNORECASE,
)

FATAL_LINE = re.compile(
    r"EngineDeadError|engine core exited unexpectedly|EngineCore encountered a fatal error"
)
"""A log line after which a server never serves again, though its process may still run."""


def _lines(log_text: str) -> tuple[list[str], list[str]]:
    """The lines that may say what went wrong, without prefixes: with and without warnings."""
    all_lines: list[str] = []
    errors: list[str] = []
    for raw in plain(log_text).split("\n"):
        match = _PREFIX.match(raw)
        level = match["level"] if match else None
        line = raw[match.end() :].rstrip() if match else raw.rstrip()
        if level in _QUIET_LEVELS or _NOISE.search(line) or all_lines[-1:] == [line]:
            continue
        all_lines.append(line[:_LINE_LIMIT])
        if level != "WARNING":
            errors.append(line[:_LINE_LIMIT])
    return all_lines, errors


def _excerpt(errors: list[str], decisive: str | None) -> str:
    """At most 15 lines that end a little after the decisive one, or with the log."""
    if decisive is not None and decisive not in errors:
        errors = [*errors, decisive]
    end = len(errors) if decisive is None else min(len(errors), errors.index(decisive) + 5)
    return "\n".join(errors[max(0, end - _EXCERPT_LINES) : end])


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "the server stopped serving"
    if returncode < 0:
        return f"the server was ended by signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"the server exited with status {returncode}"


def classify(
    log_text: str,
    *,
    returncode: int | None,
    phase: Literal["start", "load"],
    hang: str | None = None,
) -> Failure:
    """Say why a server failed.

    `log_text` is its log from the start of the phase, `returncode` its exit status (negative: a
    signal; `None`: it still runs). `hang` describes what took too long, where that was the reason
    to give up on it.
    """
    lines, errors = _lines(log_text)
    killed = returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    for row in _ROWS:
        if killed and row.failure is FailureClass.CRASH_UNDER_LOAD:
            continue  # the others of its tree die of its end, not it of theirs
        for line in lines:
            if match := row.pattern.search(line):
                crash_at_start = row.failure is FailureClass.CRASH_UNDER_LOAD and phase == "start"
                return Failure(
                    failure=FailureClass.CRASH_AT_START if crash_at_start else row.failure,
                    message=_message(line),
                    fix=row.fix.format(**match.groupdict()),
                    log_excerpt=_excerpt(errors, line),
                )
    return _without_a_row(errors, returncode, phase, hang, killed=killed)


def _message(line: str) -> str:
    """The decisive line without the exception's class path and pydantic's trailing input dump."""
    text = line.strip().partition(" [type=")[0].removeprefix("Value error, ")
    return re.sub(r"^[\w.]*?(\w+(Error|Exception): )", r"\1", text)[:_MESSAGE_LIMIT]


def _without_a_row(
    errors: list[str],
    returncode: int | None,
    phase: Literal["start", "load"],
    hang: str | None,
    *,
    killed: bool,
) -> Failure:
    """What can be said when no line is known: how it ended, and the last error it printed."""
    at_start = phase == "start"
    last = next((line for line in reversed(errors) if _ERROR_LINE.search(line)), None)
    if hang is not None:
        failure = FailureClass.HANG_AT_START if at_start else FailureClass.HANG_UNDER_LOAD
        message = hang
        fix = "Look at the log; allow more time if it was still making progress."
    elif killed:
        failure = FailureClass.OUT_OF_MEMORY
        message = "the server was killed (SIGKILL), most likely by the system for want of memory"
        fix = _MORE_MEMORY
    else:
        failure = FailureClass.CRASH_AT_START if at_start else FailureClass.CRASH_UNDER_LOAD
        message = _message(last) if last else _how_it_ended(returncode)
        fix = "See the log for the cause."
    return Failure(failure=failure, message=message, fix=fix, log_excerpt=_excerpt(errors, last))
