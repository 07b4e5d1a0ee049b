"""What several tuners are compared on: a server, a load and a goal, the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue
from surface_spec import SurfaceSpec, served_model, surfaces

from kvtune.autotune.cli.options import make_engine, make_plan
from kvtune.autotune.reporting import Quiet
from kvtune.autotune.trial import Bench
from kvtune.engines.base import Engine
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import parse_goal
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.synthetic import SyntheticSpec, make_requests
from kvtune.profilers.traces.prompts_jsonl import format_line
from kvtune.types import Choice, Goal, Harm, LoadRun, PolicyStack, Request, Trial, Workload

FIXED = ("dtype", "enforce-eager", "kv-cache-memory-bytes", "max-model-len")
"""What a server is given. A recorded surface fixes more, which here is left to whoever tunes."""

HELDOUT_SEED = 90_000
"""Requests that no tuner saw; the seeds of searches are smaller."""

Arguments = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Case:
    """A server, a load and a goal. `load.requests` is how many one replay has."""

    name: str
    built: str
    goal: str
    base_arguments: Arguments
    load: SyntheticSpec
    concurrency: int

    @property
    def limits(self) -> Goal:
        """The goal as it is checked."""
        return parse_goal(self.goal)

    def requests(self, seed: int, *, times: int = 1) -> tuple[Request, ...]:
        """The requests of `times` replays."""
        load = replace(self.load, requests=self.load.requests * times)
        return tuple(make_requests(load, seed))


@dataclass(frozen=True, slots=True)
class Setting:
    """A case with the model and the engine that it runs on."""

    case: Case
    model: str
    engine: str = "vllm"

    def start(self) -> Engine:
        """The engine; a context manager."""
        return make_engine(self.engine, python=None, command=None, cold_start=False)

    def plan(self, requests: Sequence[Request]) -> LoadPlan:
        """How `kvtune search` replays these requests."""
        return make_plan(
            Workload(self.case.name, "", tuple(requests), (), fingerprint(requests)),
            model=self.model,
            concurrency=self.case.concurrency,
            time_scale=1.0,
            natural_stop=False,
            output_tokens=1,
        )

    def bench(self, engine: Engine, requests: Sequence[Request], logs: Path) -> Bench:
        """Where trials of a case are measured."""
        return Bench(
            engine=engine,
            model=self.model,
            served_model_name="m",
            environment={},
            plan=self.plan(requests),
            goal=self.case.limits,
            log_dir=logs,
            reporter=Quiet(),
        )

    def trial(self, number: int, arguments: Arguments, seed: int) -> Trial:
        """A configuration as one trial of the bench."""
        choice = Choice(
            policy="given", parameters={}, arguments=dict(arguments), harm=Harm.LOSSLESS
        )
        return Trial(
            number=number,
            stack=PolicyStack(choices=(choice,) if arguments else ()),
            base_arguments=dict(self.case.base_arguments),
            repeats=1,
            seed=seed,
        )


def cases() -> dict[str, Case]:
    """The cases by name: those of the recorded surfaces, and one to try the programs on.

    Those of surfaces are loads for the models that these are of.
    """
    return {case.name: case for case in (*map(_of_surface, surfaces().values()), TRY)}


def setting_of(name: str, model: str, engine: str, folder: Path) -> Setting:
    """A case on a model, or on the one, kept in `folder`, that its surface is recorded on."""
    if name in surfaces() and engine == "vllm":
        folder.mkdir(parents=True, exist_ok=True)
        model = str(served_model(surfaces()[name], Path(model).resolve(), folder))
    return Setting(cases()[name], model, engine)


def write_workload(path: Path, requests: Sequence[Request]) -> None:
    """Write requests as `kvtune search --workload` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(format_line(request) + "\n" for request in requests))


def got_through(run: LoadRun) -> bool:
    """Whether a replay carried its load: at most one request in a hundred failed."""
    failed = sum(not record.ok for record in run.records)
    return bool(run.records) and failed <= 0.01 * len(run.records)


def settings_text(arguments: Arguments) -> str:
    """Arguments in one line; no arguments are the stock configuration."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in sorted(arguments.items())) or (
        "stock"
    )


def _shown(value: JsonValue) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _of_surface(spec: SurfaceSpec) -> Case:
    return Case(
        name=spec.name,
        built=spec.built,
        goal=spec.goal,
        base_arguments={name: spec.base_arguments[name] for name in FIXED},
        load=spec.load,
        concurrency=spec.concurrency,
    )


TRY = Case(
    name="try",
    built="4 at a time over a prefix of 64 tokens, to try the programs on simulated servers",
    goal="max goodput where p95 ttft <= 1s",
    base_arguments={
        "kv-cache-memory-bytes": 32 << 20,
        "max-model-len": 512,
        "simulate-time-scale": 0.2,
    },
    load=SyntheticSpec(
        requests=12,
        input_tokens="uniform:8-16",
        output_tokens="uniform:4-8",
        shared_prefixes=1,
        prefix_tokens=64,
    ),
    concurrency=4,
)
