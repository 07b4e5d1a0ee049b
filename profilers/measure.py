"""Replay a workload against an endpoint once: requests to bytes, bytes to a `LoadRun`.

Every replay gets its own salt. Length-only requests become other tokens with another salt, and
vLLM's `cache_salt` keeps the blocks of one replay from serving the next, so a prefix cache never
carries over from an earlier repeat, while requests of one replay still share what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtune.errors import BadInput
from kvtune.profilers.load.client import ClosedLoop, KeptText, OpenLoop, Watch, replay
from kvtune.profilers.load.progress import Progress
from kvtune.profilers.load.request import PreparedRequest, prepare
from kvtune.profilers.materialize import fits, materialize
from kvtune.profilers.quality.traffic import KEPT_MESSAGES, sample
from kvtune.types import Endpoint, Failure, LoadRun, Request

WARMUP_SALT_OFFSET = 1 << 20

UNKNOWN_VOCAB_SIZE = 30_000
"""Token ids of length-only requests where the vocabulary is not known; the smallest in common use
has 32,000."""

WARMUP_MOST = 16
"""Requests after which a warm-up ends, steady or not."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How requests are sent. `vocab_size` bounds the token ids of length-only requests.

    The warm-up has `warmup_requests`. With `warmup_most`, as many again follow until decode steps
    are steady, at most so many in all. `at_boundary` says that the load is not fixed: `arrivals` is
    where the search for the highest load that keeps the goal begins, see `autotune.boundary`.
    `warnings` say what is doubtful about the plan itself; every run of it carries them.
    """

    arrivals: OpenLoop | ClosedLoop
    fixed_length: bool = True
    default_output_tokens: int = 128
    warmup_requests: int = 4
    warmup_most: int | None = None
    at_boundary: bool = False
    vocab_size: int = UNKNOWN_VOCAB_SIZE
    request_timeout_s: float = 300.0
    stall_timeout_s: float = 120.0
    warnings: tuple[str, ...] = ()

    @property
    def concurrency(self) -> int | None:
        """How many requests are in flight all the time; None where arrivals decide it."""
        if self.at_boundary or not isinstance(self.arrivals, ClosedLoop):
            return None
        return self.arrivals.concurrency

    def key(self) -> dict[str, str | int | float | bool]:
        """What of the plan a stored measurement depends on.

        Not `warmup_most`: a server that is steady after the first requests is sent no more, and of
        one that is not, a longer warm-up gives the same figures more surely.
        """
        found: dict[str, str | int | float | bool] = {
            "arrivals": repr(self.arrivals),
            "fixed_length": self.fixed_length,
            "default_output_tokens": self.default_output_tokens,
            "warmup_requests": self.warmup_requests,
        }
        if self.at_boundary:  # Without, it is what it was before there was a boundary.
            found["load_at"] = "boundary"
        return found


def prepare_requests(
    requests: Sequence[Request],
    plan: LoadPlan,
    endpoint: Endpoint,
    *,
    salt: int,
    max_model_len_tokens: int | None,
) -> tuple[list[PreparedRequest], tuple[str, ...]]:
    """The bytes to send, and warnings about requests that had to be cut or left out."""
    made = materialize(
        requests,
        vocab_size=plan.vocab_size,
        max_model_len_tokens=max_model_len_tokens,
        salt=salt,
        default_output_tokens=plan.default_output_tokens,
    )
    warnings = []
    if made.clipped:
        warnings.append(
            f"{made.clipped} of {len(requests)} prompts were cut to the model's context"
        )
    if made.dropped:
        warnings.append(
            f"{made.dropped} of {len(requests)} requests do not fit the model's context"
        )
    prepared = [
        prepare(
            request,
            model=endpoint.model,
            index=index,
            fixed_length=plan.fixed_length,
            output_tokens=request.output_tokens or plan.default_output_tokens,
            cache_salt=f"kvtune-{salt}" if endpoint.is_vllm else None,
        )
        for index, request in enumerate(made.requests)
    ]
    return prepared, tuple(warnings)


def sent_requests(
    requests: Sequence[Request], plan: LoadPlan, *, max_model_len_tokens: int | None
) -> list[Request]:
    """The requests that a replay sends, as the workload has them; records count these."""
    return [
        request
        for request in requests
        if fits(
            request,
            max_model_len_tokens=max_model_len_tokens,
            default_output_tokens=plan.default_output_tokens,
        )
    ]


async def replay_workload(
    endpoint: Endpoint,
    requests: Sequence[Request],
    plan: LoadPlan,
    *,
    salt: int,
    max_model_len_tokens: int | None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], Failure | None] | None = None,
    keep_text: bool = False,
    watch: Watch | None = None,
) -> LoadRun:
    """Send every request once, after a warm-up that is not recorded.

    `keep_text` keeps the beginning of some answers, as many as `traffic` looks at. `watch` may end
    the run before all were sent.

    Raises:
        BadInput: no request is left that fits the model's context.
    """
    prepared, warnings = prepare_requests(
        requests, plan, endpoint, salt=salt, max_model_len_tokens=max_model_len_tokens
    )
    if not prepared:
        raise BadInput(
            f"none of the {len(requests)} requests fits the model's context of "
            f"{max_model_len_tokens} tokens",
            fix="raise --max-model-len or use a workload with shorter prompts",
        )
    warmup, _ = prepare_requests(
        requests[: plan.warmup_most or plan.warmup_requests],
        plan,
        endpoint,
        salt=salt + WARMUP_SALT_OFFSET,
        max_model_len_tokens=max_model_len_tokens,
    )
    sent = sent_requests(requests, plan, max_model_len_tokens=max_model_len_tokens)
    run = await replay(
        endpoint,
        prepared,
        plan.arrivals,
        warmup=warmup,
        warmup_pass=None if plan.warmup_most is None else plan.warmup_requests,
        request_timeout_s=plan.request_timeout_s,
        stall_timeout_s=plan.stall_timeout_s,
        on_progress=on_progress,
        should_stop=should_stop,
        keep_text=KeptText(sample(sent), KEPT_MESSAGES) if keep_text else None,
        watch=watch,
    )
    return replace(run, warnings=(*plan.warnings, *warnings, *run.warnings))


def without_text(run: LoadRun) -> LoadRun:
    """The run without what the answers said: that is nobody's to write down."""
    return replace(run, records=tuple(replace(record, text=None) for record in run.records))


async def ask_text(
    endpoint: Endpoint,
    request: Request,
    *,
    request_timeout_s: float = 300.0,
    stall_timeout_s: float = 120.0,
    should_stop: Callable[[], Failure | None] | None = None,
) -> str:
    """The completion of one request at temperature 0, alone, with natural stop.

    Raises:
        ConnectionError: the request failed; the message says how.
    """
    output_tokens = request.output_tokens or 32
    prepared = prepare(
        request,
        model=endpoint.model,
        index=0,
        fixed_length=False,
        output_tokens=output_tokens,
        cache_salt="kvtune-canary" if endpoint.is_vllm else None,
    )
    run = await replay(
        endpoint,
        [prepared],
        ClosedLoop(1),
        request_timeout_s=request_timeout_s,
        stall_timeout_s=stall_timeout_s,
        should_stop=should_stop,
        scrape_interval_s=None,
        keep_text=KeptText(),
    )
    record = run.records[0]
    if record.error is not None:
        raise ConnectionError(record.error)
    return record.text or ""
