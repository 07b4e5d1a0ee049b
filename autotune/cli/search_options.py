"""Options of `kvtune search` alone, and what is read from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtune import types
    from kvtune.autotune.cli.options import Arguments
    from kvtune.autotune.limits import Also, QualityRules, Sampler
    from kvtune.autotune.space import SearchSpace
    from kvtune.profilers.measure import LoadPlan

Model = Annotated[str, typer.Option("--model", help="Checkpoint directory or hub id to serve.")]
Workload = Annotated[
    str, typer.Option("--workload", help="Requests to tune for (see kvtune workload).")
]
Budget = Annotated[
    int, typer.Option("--budget", min=1, help="Trials, the stock defaults included.")
]
BudgetTime = Annotated[
    str | None, typer.Option("--budget-time", help="Time for everything, such as 15m.")
]
Study = Annotated[
    str | None, typer.Option("--study", help="Name of the study [default: from its contents].")
]
HeldoutShare = Annotated[
    float, typer.Option("--heldout-share", help="Share of requests kept for confirmation.")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Replays of the workload a trial.")]
Finalists = Annotated[
    int, typer.Option("--finalists", min=1, help="Trials to confirm beside the defaults.")
]
ConfirmRounds = Annotated[
    int,
    typer.Option(
        "--confirm-rounds",
        min=2,
        help="Interleaved rounds of confirmation, at most; a clear outcome ends them sooner.",
    ),
]
Probe = Annotated[
    bool,
    typer.Option(
        "--probe/--no-probe",
        help="Measure what decode steps cost on the defaults' server, so that trials can be "
        "forecast; once for a model, engine and device.",
    ),
]
ProbeTime = Annotated[
    str,
    typer.Option(
        "--probe-time", help="How long the probe may take; never over a tenth of --budget-time."
    ),
]
MaxHarm = Annotated[
    str,
    typer.Option(
        "--max-harm",
        help="lossless, near-lossless or lossy: the most harm that may be tried, if less misses "
        "the goal. Whatever may change answers has to pass the questions of quality.",
    ),
]
MaxHostMemory = Annotated[
    str | None,
    typer.Option(
        "--max-host-memory",
        help="Host memory that a setting may take beside the KV pool at most, such as 8GiB; with "
        "0 none is tried that takes any [default: a quarter of what the pool leaves, and no more "
        "than 16 times the pool].",
        show_default=False,
    ),
]
ExploreLossy = Annotated[
    bool,
    typer.Option(
        "--explore-lossy",
        help="Try levers that may change answers from the start, and print the price of each step "
        "of harm.",
    ),
]
Quality = Annotated[
    list[str] | None,
    typer.Option(
        "--quality",
        help='What answers may lose at most, such as "needle >= -1pt" or "kl <= 0.02" '
        "(repeatable) [default: in each category what its suite allows].",
        show_default=False,
    ),
]
QualitySize = Annotated[
    str,
    typer.Option(
        "--quality-size",
        help="What finalists that may change answers have to pass: screen, standard or full. "
        "At standard and full they are asked as many items as proving the limits takes; a "
        "screen, which every other such trial is asked, proves next to nothing.",
    ),
]
QualityData = Annotated[
    str | None,
    typer.Option(
        "--quality-data",
        help="Your own questions, asked as the suite yours: JSON lines, as for kvtune quality "
        "--data.",
    ),
]
NoQuality = Annotated[
    bool,
    typer.Option(
        "--no-quality",
        help="Ask no questions: leaves a long-prompt canary and a look at the answers to the "
        "workload itself.",
    ),
]
Remeasure = Annotated[
    bool,
    typer.Option(
        "--remeasure",
        help="Measure again what another study knows and what failed in this one.",
    ),
]
NoReuse = Annotated[
    bool,
    typer.Option(
        "--no-reuse",
        help="Start a server for every trial, also where a running one could be changed to it. The "
        "confirmation always does.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be searched, and stop.")]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour",
        min=0,
        help="What an hour of this machine costs, in any currency: shows what was spent and what "
        "is left to spend.",
    ),
]
Plain = Annotated[
    bool,
    typer.Option("--plain", help="Print lines instead of the live view, also on a terminal."),
]


SamplerName = Annotated[
    str,
    typer.Option(
        "--sampler",
        help="Who says what to try: model (simulations, corrected by what was measured), tpe "
        "(Optuna's), or auto: the model, but for large spaces of which nothing can be simulated.",
    ),
]

LoadAt = Annotated[
    str,
    typer.Option(
        "--load-at",
        help="fixed: all trials are measured at the load that --concurrency or the workload's "
        "times give. boundary: each at the highest load at which it meets the goal, found on its "
        "running server, beginning there.",
    ),
]


def load_at(text: str, plan: LoadPlan, workload: types.Workload, goal: types.Goal) -> LoadPlan:
    """The plan with the load that is asked for.

    Raises:
        BadInput: there is no such load, or no highest one to be found.
    """
    from dataclasses import replace

    from kvtune.autotune.boundary import check_boundary
    from kvtune.errors import BadInput

    if text not in ("fixed", "boundary"):
        raise BadInput(f"--load-at {text!r} is not known", fix="use fixed or boundary")
    if text == "fixed":
        return plan
    for requests in filter(None, (workload.requests, workload.heldout)):
        check_boundary(plan, requests, goal)
    return replace(plan, at_boundary=True)


def read_harm(text: str) -> types.Harm:
    """The most harm that may be tried.

    Raises:
        BadInput: there is no harm of that name.
    """
    from kvtune.errors import BadInput
    from kvtune.types import Harm

    try:
        return Harm(text)
    except ValueError:
        fix = f"use {', '.join(Harm)}"
        raise BadInput(f"--max-harm {text!r} is not known", fix=fix) from None


def read_host_memory(text: str | None) -> int | None:
    """The most host memory that a setting may take, in bytes; None where nobody says.

    Raises:
        BadInput: it is neither 0 nor a size.
    """
    from kvtune.autotune.cli.options import parse_bytes

    if text is None:
        return None
    return 0 if text.strip() == "0" else parse_bytes(text)


Enough = Annotated[
    str | None,
    typer.Option(
        "--enough",
        help="End before the budget is spent once the best so far is expected to lack no more "
        "than this share of the best of all that was looked at, 2% if nothing is said; 0 spends "
        "all of it.",
        show_default=False,
    ),
]


def read_enough(text: str | None) -> float:
    """What a choice may be expected to lack of the best, as a share.

    Raises:
        BadInput: it is neither 0 nor a percentage below 100.
    """
    from kvtune.autotune.limits import ENOUGH
    from kvtune.errors import BadInput

    if text is None:
        return ENOUGH
    match = re.fullmatch(r"\s*(?:0|(\d+(?:\.\d+)?)\s*%)\s*", text)
    if match is None or float(match[1] or 0) >= 100:
        raise BadInput(f"--enough {text!r} is not a share", fix="write it like 2% or 0.5%, or 0")
    return float(match[1] or 0) / 100


AlsoWanted = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        help="Search for what else is wanted beside the goal's objective, too: quality (answers "
        "close to stock ones; tries what may change them from the start) or memory (a small KV "
        "pool). The result is a front (repeatable).",
        show_default=False,
    ),
]


def read_also(texts: list[str], harm: types.Harm, *, asks_quality: bool) -> tuple[Also, ...]:
    """What is wanted beside the goal's own objective, each once.

    Raises:
        BadInput: there is no such objective, or it could not be measured.
    """
    from kvtune.autotune.limits import Also
    from kvtune.errors import BadInput
    from kvtune.types import Harm

    for text in texts:
        if text not in [*Also]:
            raise BadInput(f"--also {text!r} is not known", fix=f"use {' or '.join(Also)}")
    found = tuple(one for one in Also if one in texts)
    if Also.QUALITY not in found:
        return found
    if not asks_quality:
        raise BadInput(
            "--also quality cannot be measured where no questions are asked",
            fix="leave out --no-quality",
        )
    if harm is Harm.LOSSLESS:
        raise BadInput(
            "--also quality tells nothing apart: lossless settings all answer as stock ones do",
            fix="use --max-harm near-lossless, or leave out --also quality",
        )
    return found


def refuse_same_memory(also: tuple[Also, ...], space: SearchSpace, base: Arguments) -> None:
    """Refuse memory as an objective where all settings of a space have the same.

    Raises:
        BadInput: they do.
    """
    if not also:
        return
    from kvtune.autotune.limits import Also
    from kvtune.autotune.objectives import why_same_memory
    from kvtune.errors import BadInput

    if Also.MEMORY in also and (why := why_same_memory(space, base)):
        raise BadInput(
            f"--also memory cannot be measured here: no setting that is searched changes it: {why}",
            fix="leave out --also memory",
        )


def read_sampler(text: str) -> Sampler:
    """Who says what to try.

    Raises:
        BadInput: there is nobody of that name.
    """
    from kvtune.autotune.limits import Sampler
    from kvtune.errors import BadInput

    try:
        return Sampler(text)
    except ValueError:
        fix = f"use {', '.join(Sampler)}"
        raise BadInput(f"--sampler {text!r} is not known", fix=fix) from None


def quality_rules(
    texts: list[str],
    size_name: str,
    data: str | None,
    workload: types.Workload,
    context_tokens: int | None,
    *,
    no_quality: bool,
) -> QualityRules | None:
    """What answers may lose; `None` if nothing is to be asked.

    Raises:
        BadGoal: a limit that cannot be read, or that nothing could be held against.
        BadInput: there is no such size, or a line of the data cannot be used.
        NotFound: there is no such file.
    """
    from kvtune.autotune.cli.quality_subjects import read_size
    from kvtune.autotune.limits import QualityRules
    from kvtune.autotune.quality.sizing import read_limits
    from kvtune.errors import BadInput

    size = read_size(size_name)
    limits = read_limits(texts, size, workload, context_tokens, data)
    if no_quality and (limits or data is not None):
        raise BadInput(
            "--no-quality asks nothing that --quality could be held against, and no data",
            fix="leave one of them out",
        )
    return None if no_quality else QualityRules(limits, size, data)


def context_tokens(base: Arguments, model: str) -> int | None:
    """The context as far as it is known before a server has told it."""
    from kvtune.policies.checkpoint import model_shape
    from kvtune.policies.settings import read_count

    asked = read_count(base.get("max-model-len"))
    shape = None if asked else model_shape(model)
    return asked if shape is None else shape.max_tokens
