"""What a load run measured: its requests one by one, and what became of the trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from kvtune.types.base import EffectiveConfig, Failure, GpuUse, Status, Stored


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds since the start of the run.

    `gaps_s` are the times between consecutive output tokens, one a token after the first; tokens
    that arrive in one message share its time, so their gaps after the first are 0.
    """

    index: int
    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float
    gaps_s: tuple[float, ...]
    input_tokens: int | None
    output_tokens: int
    requested_output_tokens: int | None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request completed with at least one token."""
        return self.error is None and self.first_token_s is not None


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One replay of a set of requests: raw records (warm-up excluded) and the server's counters.

    `counters` are deltas over the run keyed by Prometheus series; `gauges` are samples taken during
    it, keyed the same way, as (seconds since start, value). Both are of `counted_s` seconds only
    where the server restarted or went away meanwhile; `lost` then says what happened, if it was
    gone at the end. `gpus` are the visible ones of this machine, wherever the server is. `cut` says
    why it was ended before all requests had; those in flight then have no record.
    """

    records: tuple[RequestRecord, ...]
    duration_s: float
    client_cpu_s: float
    counters: Mapping[str, float]
    gauges: Mapping[str, Sequence[tuple[float, float]]]
    warnings: tuple[str, ...] = ()
    counted_s: float | None = None
    lost: str = ""
    gpus: tuple[GpuUse, ...] = ()
    cut: str = ""


AnswerFault = Literal["empty", "unreadable", "looping", "off-script"]


class BrokenAnswer(Stored):
    """The beginning of an answer that looks broken, and why it does.

    `request` is the place of the request among those that were sent.
    """

    request: int
    kind: AnswerFault
    why: str
    text: str


class OutputHealth(Stored):
    """How many answers to a trial's own requests look broken, by the first fault of each.

    `answers` were looked at, one for each different prompt of a sample. `text_prompts` of them
    answer a prompt that is text: only these can be off-script. `long_prompts` of them answer a
    prompt of at least two KV blocks; `None` where the block size is not known.
    """

    answers: int
    text_prompts: int
    long_prompts: int | None
    empty: int = 0
    unreadable: int = 0
    looping: int = 0
    off_script: int = 0
    examples: tuple[BrokenAnswer, ...] = ()

    @property
    def broken(self) -> int:
        """How many answers have any fault."""
        return self.empty + self.unreadable + self.looping + self.off_script


class LoadLevel(Stored):
    """One load that a server was put under, and how that went.

    `load` is in the unit of the `Boundary`. Of all limits, `worst` is the one that was missed most,
    or came closest to it; `violation` is the logarithm of its value over the limit, so that at most
    0 means held. Both are `None` where requests failed.
    """

    load: float
    violation: float | None
    worst: str | None

    @property
    def held(self) -> bool:
        """Whether every limit was kept."""
        return self.violation is not None and self.violation <= 0


class Boundary(Stored):
    """How the highest load was found at which a goal holds: `levels` in the order they were tried.

    `is_cliff` says that from the highest load that held to the lowest that did not, what is limited
    becomes more than twice as much.
    """

    unit: Literal["requests in flight", "requests/s"]
    levels: tuple[LoadLevel, ...]
    is_cliff: bool = False


class Measurement(Stored):
    """The outcome of a trial. `metrics` maps a metric name to one value per repeat.

    `canary_answers` are the texts that the long-prompt canary got, where it was asked. `outputs`
    says what the answers of the first repeat looked like.

    `wall_s` goes from the launch to the last figure, or to the failure. Parts of it are `start_s`,
    `warmup_s` and `load_s` (all repeats together), and `asked_s`, which went into the questions of
    quality suites; `stop_s` comes on top of it. A part is `None` where it was not reached or kept.

    With the status `CUT`, `metrics` are those of the `share` of the requests that had ended, and
    `cut` says in words why it was given up.

    With a `boundary`, the load was not fixed, and `metrics` are those of the highest load that held
    the goal, or else of the lowest that was tried. Beside them are `boundary_low` and
    `boundary_high`, the highest that held and the lowest that did not, as far as there are such,
    and `boundary_load` between them, where limits are just met. One that was cut held less than
    another's boundary, and `share` is the part of that which it did not hold either.
    """

    status: Status
    failure: Failure | None = None
    metrics: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    effective: EffectiveConfig | None = None
    counters: tuple[dict[str, float], ...] = ()
    warnings: tuple[str, ...] = ()
    cache: Literal["cold", "warm", "unknown"] = "unknown"
    requests_per_repeat: int = 0
    start_s: float | None = None
    wall_s: float | None = None
    warmup_s: float | None = None
    load_s: float | None = None
    stop_s: float | None = None
    asked_s: float = 0.0
    share: float = 1.0
    cut: str = ""
    canary_answers: tuple[str, ...] | None = None
    outputs: OutputHealth | None = None
    boundary: Boundary | None = None
    kv_bytes_per_token_predicted: int | None = None
    kv_bytes_per_token_observed: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    measured_at: str = ""
