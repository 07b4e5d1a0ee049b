"""The file of a recorded surface: a header, then one line for each measurement, as they were made.

A surface is recorded into `NAME.jsonl`, line by line, and packed into `NAME.jsonl.xz` when it is
complete. Each line keeps when every token came, so that any goal can be applied afterwards. No text
is kept, of prompts or of answers.
"""

from __future__ import annotations

import lzma
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue
from surface_spec import Point

from kvtune.errors import BadInput
from kvtune.types import (
    Ceilings,
    Device,
    EffectiveConfig,
    EngineInfo,
    FailureClass,
    LoadRun,
    Measurement,
    RequestRecord,
    StepTimeModel,
    Stored,
    Verdict,
)

TICK_S = 0.0005
"""Unit of times that are kept as whole numbers."""

SMALLEST_GAP_S = 0.0001
GAP_STEP = 1.02
"""Gaps between tokens are kept as powers of this times the smallest one: to a hundredth each."""

COUNTERS = (
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
)
"""The server's counters that are kept."""

Kind = Literal["point", "reference", "repeat"]
PackedRequest = tuple[int, int, int | None, int, int | None, int, int | None, int | None, str, Any]


class Axis(Stored):
    """An engine argument with its recorded values."""

    argument: str
    values: tuple[JsonValue, ...]
    stock: JsonValue


class Header(Stored):
    """What all measurements of a surface have in common.

    `requests` are the load's (input tokens, output tokens, blocks of shared prefix) one by one, and
    `plan` what `LoadPlan.key` says of how they were sent. `model_shape` has the fields of
    `kvtune.policies.model_shape.ModelShape`. `effective`, `verdict` and `step_time` are those of
    the stock configuration, and `cpu_flags` the CPU's features that levers depend on.
    """

    name: str
    built: str
    goal: str
    axes: tuple[Axis, ...]
    base_arguments: dict[str, JsonValue]
    load: dict[str, JsonValue]
    seed: int
    concurrency: int
    warmup_requests: int
    plan: dict[str, JsonValue]
    model: str
    checkpoint: str
    model_shape: dict[str, JsonValue]
    vocab_size: int
    weight_bytes: int | None
    device: Device
    cpu_flags: tuple[str, ...]
    engine: EngineInfo
    versions: dict[str, str]
    effective: EffectiveConfig
    verdict: Verdict
    step_time: StepTimeModel | None
    ceilings: Ceilings
    max_concurrency: int
    began_at: str

    @property
    def stock(self) -> Point:
        """The point that sets nothing."""
        return tuple(axis.stock for axis in self.axes)


class Fault(Stored):
    """Why a measurement gave no figures."""

    failure: FailureClass
    message: str


class Line(Stored):
    """One measurement. `at_s` counts from the first one of the surface, on the wall clock.

    `others_cores` is how many cores were busy with something else meanwhile, and
    `others_cores_before` in the second before. `effective` holds what differs from the header's.
    `requests` are packed by `pack_requests`.
    """

    n: int
    kind: Kind
    point: tuple[JsonValue, ...]
    session: int
    at_s: float
    others_cores_before: float
    others_cores: float | None = None
    failure: Fault | None = None
    start_s: float | None = None
    warmup_s: float | None = None
    load_s: float | None = None
    stop_s: float | None = None
    wall_s: float
    effective: dict[str, JsonValue] = Field(default_factory=dict)
    counters: dict[str, float] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    requests: tuple[tuple[Any, ...], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it gave figures."""
        return self.failure is None


class Recording(Stored):
    """A surface as far as it was recorded."""

    header: Header
    lines: tuple[Line, ...]


def read_recording(path: Path) -> Recording:
    """Read a recording, packed or not. A last line that was cut off is left out.

    Raises:
        BadInput: the file is no recording.
    """
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    # What follows the last newline was being written when its process ended.
    rows = text.split("\n")[:-1]
    try:
        header = Header.model_validate_json(rows[0])
        return Recording(header=header, lines=tuple(map(Line.model_validate_json, rows[1:])))
    except (IndexError, ValueError) as error:
        raise BadInput(
            f"{path.name} is no recorded surface: {error}", fix="record it again"
        ) from error


def append(path: Path, row: Header | Line) -> None:
    """Write one more line, so that it outlasts a loss of power; what was cut off before it goes."""
    text = row.model_dump_json(exclude_defaults=isinstance(row, Line)) + "\n"
    with path.open("ab+") as file:
        whole = _whole_bytes(path)
        if whole < file.seek(0, os.SEEK_END):
            file.truncate(whole)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def pack(path: Path) -> Path:
    """Compress a complete recording beside it, and return where."""
    packed = path.with_suffix(path.suffix + ".xz")
    packed.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    return packed


def pack_requests(records: Iterable[RequestRecord]) -> tuple[PackedRequest, ...]:
    """Requests as short rows.

    A row is: index, sent, first token (None: none came) and end, both after sending, input, output,
    requested and cached tokens, error, and the codes of the gaps. Times are in ticks; see
    `gap_codes`.
    """
    return tuple(_packed(record) for record in records)


def run_of(line: Line) -> LoadRun:
    """The measured run, as exact as it was kept.

    Raises:
        ValueError: the measurement failed.
    """
    if line.load_s is None:
        raise ValueError(f"measurement {line.n} has no run")
    records = tuple(_unpacked(row) for row in line.requests)
    return LoadRun(records, line.load_s, 0.0, line.counters, {})


def gap_codes(gaps_s: Sequence[float]) -> list[int]:
    """Whole numbers for gaps: 0 for none, else 1 more than the power of `GAP_STEP`."""
    return [_code(gap_s) for gap_s in gaps_s]


def gaps_of(codes: Iterable[int]) -> tuple[float, ...]:
    """The gaps behind codes, in seconds."""
    return tuple(map(_gap_s, codes))


def kept_counters(measurement: Measurement) -> dict[str, float]:
    """The counters of a measurement that are kept and were not 0."""
    found = measurement.counters[0] if measurement.counters else {}
    return {name: found[name] for name in COUNTERS if found.get(name)}


def differences(effective: EffectiveConfig, base: EffectiveConfig) -> dict[str, JsonValue]:
    """The fields of an effective configuration that are not those of another one."""
    mine, other = effective.model_dump(mode="json"), base.model_dump(mode="json")
    return {name: value for name, value in mine.items() if value != other[name]}


def effective_of(line: Line, header: Header) -> EffectiveConfig:
    """What the server of a measurement ran with."""
    return EffectiveConfig.model_validate({**header.effective.model_dump(), **line.effective})


def _code(gap_s: float) -> int:
    if gap_s < SMALLEST_GAP_S / 2:
        return 0
    power = math.log(max(gap_s, SMALLEST_GAP_S) / SMALLEST_GAP_S) / math.log(GAP_STEP)
    return 1 + round(power)


def _gap_s(code: int) -> float:
    return 0.0 if code == 0 else SMALLEST_GAP_S * GAP_STEP ** (code - 1)


def _packed(record: RequestRecord) -> PackedRequest:
    first_s = record.first_token_s
    return (
        record.index,
        round(record.sent_s / TICK_S),
        None if first_s is None else round((first_s - record.sent_s) / TICK_S),
        round((record.end_s - record.sent_s) / TICK_S),
        record.input_tokens,
        record.output_tokens,
        record.requested_output_tokens,
        record.cached_tokens,
        record.error or "",
        gap_codes(record.gaps_s),
    )


def _unpacked(row: Sequence[Any]) -> RequestRecord:
    index, sent, first, end, read, written, asked, cached, error, codes = row
    sent_s = sent * TICK_S
    return RequestRecord(
        index=index,
        scheduled_s=sent_s,
        sent_s=sent_s,
        first_token_s=None if first is None else sent_s + first * TICK_S,
        end_s=sent_s + end * TICK_S,
        gaps_s=gaps_of(codes),
        input_tokens=read,
        output_tokens=written,
        requested_output_tokens=asked,
        cached_tokens=cached,
        error=error or None,
    )


def _whole_bytes(path: Path) -> int:
    """How much of a file is whole lines."""
    return path.read_bytes().rfind(b"\n") + 1
