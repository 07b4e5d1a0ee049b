"""Measure one point of a surface: a server, its load, and how busy the machine was with others."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import JsonValue
from surface_file import (
    Axis,
    Fault,
    Header,
    Kind,
    Line,
    differences,
    kept_counters,
    pack_requests,
)
from surface_spec import Point, SurfaceSpec, changed

import kvtune
from kvtune.autotune.cli.options import make_plan
from kvtune.autotune.profiling import Subject, observed_concurrency, profile_of
from kvtune.autotune.reporting import Quiet
from kvtune.autotune.trial import Bench, run_trial
from kvtune.engines.base import Engine, RunningServer
from kvtune.errors import BadInput
from kvtune.kernels.ceilings import measure_ceilings
from kvtune.kernels.device import cpu_flags, detect_device
from kvtune.policies.checkpoint import model_shape, vocab_size, weight_bytes
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import parse_goal
from kvtune.profilers.load import runtime
from kvtune.profilers.measure import LoadPlan
from kvtune.profilers.probe import ProbeResult, probe
from kvtune.types import (
    Ceilings,
    Choice,
    Device,
    Harm,
    LoadRun,
    Measurement,
    PolicyStack,
    Profile,
    StepTimeModel,
    Trial,
    Workload,
    fingerprint_of,
)

PROBE_S = 30.0
"""The default of `kvtune profile`."""

QUIET_S = 1.0
"""How long is looked whether anybody computes."""

COMPUTING = ("user", "nice", "system", "irq", "softirq", "steal")
"""What psutil calls the parts of time in which a core computes; `steal` is for other guests."""

FLAGS = ("avx512f", "amx_tile")
"""Features of a CPU that policies ask about."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A line to write, and its figures in short."""

    line: Line
    said: str


@dataclass(slots=True)
class SurfaceBench:
    """Measures points of a surface. The first one must be stock; it makes the header."""

    spec: SurfaceSpec
    engine: Engine
    model: Path
    logs: Path
    device: Device = field(init=False)
    ceilings: Ceilings = field(init=False)
    plan: LoadPlan = field(init=False)
    workload: Workload = field(init=False)
    _header: Header | None = None

    def __post_init__(self) -> None:
        requests = self.spec.requests()
        self.workload = Workload(self.spec.name, "surfaces", requests, (), fingerprint(requests))
        plan = make_plan(
            self.workload,
            model=str(self.model),
            concurrency=self.spec.concurrency,
            time_scale=1.0,
            natural_stop=False,
            output_tokens=1,
        )
        self.plan = LoadPlan(
            plan.arrivals, warmup_requests=self.spec.warmup_requests, vocab_size=plan.vocab_size
        )
        self.device = detect_device()

    @property
    def header(self) -> Header:
        """What all measurements have in common.

        Raises:
            RuntimeError: nothing was measured yet.
        """
        if self._header is None:
            raise RuntimeError("the stock configuration makes the header")
        return self._header

    def resume(self, header: Header) -> None:
        """Go on with a recording.

        Raises:
            BadInput: it is of another surface, model, machine or version.
        """
        expected = self._identity()
        found = header.model_dump(mode="json", include=set(expected))
        if other := [name for name in expected if expected[name] != found[name]]:
            raise BadInput(
                f"the recording was made with another {', '.join(other)}",
                fix="record where it was begun, or move it away to begin anew",
            )
        self._header = header

    def measure(
        self, n: int, kind: Kind, point: Point, session: int, busy_cores: float
    ) -> Measured:
        """Measure a point.

        Raises:
            BadInput: stock failed, or is bound by something else than the surface is meant to be.
        """
        if self._header is None:
            self.ceilings = measure_ceilings(self.device)
        began = datetime.now(UTC)
        start_s, watch = time.monotonic(), _Watch()
        probed: list[ProbeResult] = []

        def afterwards(trial: Trial, server: RunningServer, found: Measurement) -> Measurement:
            watch.end()
            if self._header is None:
                probed.append(self._probed(server))
            return found

        measurement, runs = run_trial(
            self._trial(n, point),
            self._bench(),
            self.workload.requests,
            canary=False,
            label=self.spec.name,
            afterwards=afterwards,
        )
        wall_s = time.monotonic() - start_s - sum(found.wall_s for found in probed)
        if kind == "reference":
            profile = self._judged(measurement, runs, probed)
            if self._header is None:
                self._header = self._begun(began, measurement, runs[0], profile)
        header = self.header
        known: dict[str, object] = {}
        said = ""
        if measurement.failure is None and measurement.effective is not None:
            run, took_s = runs[0], measurement.wall_s or 0.0
            launch_s = measurement.start_s or 0.0
            known = {
                "start_s": round(launch_s, 3),
                "warmup_s": round(took_s - launch_s - run.duration_s, 3),
                "load_s": round(run.duration_s, 4),
                "stop_s": round(wall_s - took_s, 3),
                "effective": differences(measurement.effective, header.effective),
                "counters": kept_counters(measurement),
                "warnings": measurement.warnings,
                "requests": pack_requests(run.records),
                "others_cores": round(watch.others_cores, 2),
            }
            said = _said(measurement.metrics)
        elif measurement.failure is not None:
            message = measurement.failure.message.replace(str(self.model), self.model.name)
            known = {"failure": Fault(failure=measurement.failure.failure, message=message)}
        line = Line.model_validate(
            {
                "n": n,
                "kind": kind,
                "point": point,
                "session": session,
                "at_s": round(began.timestamp() - _seconds(header.began_at), 1),
                "others_cores_before": round(busy_cores, 2),
                "wall_s": round(wall_s, 2),
                **known,
            }
        )
        return Measured(line, said)

    def _trial(self, n: int, point: Point) -> Trial:
        arguments = changed(self.spec.axes, point)
        choice = Choice(policy="surface", parameters={}, arguments=arguments, harm=Harm.LOSSLESS)
        return Trial(
            number=n,
            stack=PolicyStack(choices=(choice,) if arguments else ()),
            base_arguments=dict(self.spec.base_arguments),
            repeats=1,
            seed=self.spec.seed,
        )

    def _bench(self) -> Bench:
        return Bench(
            engine=self.engine,
            model=str(self.model),
            served_model_name="m",
            environment={},
            plan=self.plan,
            goal=parse_goal(self.spec.goal),
            log_dir=self.logs,
            reporter=Quiet(),
        )

    def _probed(self, server: RunningServer) -> ProbeResult:
        return runtime.run(
            probe(
                server.endpoint,
                server.effective,
                budget_s=PROBE_S,
                salt=self.spec.seed,
                vocab_size=self.plan.vocab_size,
                resets_cache=True,
                should_stop=server.failure,
            )
        )

    def _judged(
        self, found: Measurement, runs: tuple[LoadRun, ...], probed: list[ProbeResult]
    ) -> Profile:
        if found.failure is not None:
            raise BadInput(
                f"the stock configuration failed: {found.failure.message}",
                fix="see that the machine is idle, and run the same command again",
            )
        known: StepTimeModel | None = None if self._header is None else self._header.step_time
        profile = profile_of(
            Subject(
                model=str(self.model),
                endpoint_url="",
                arguments=self.spec.base_arguments,
                effective=found.effective,
                engine=self.engine.describe(),
                device=self.device,
                fingerprint=self.workload.fingerprint,
            ),
            runs[0],
            parse_goal(self.spec.goal),
            is_load_ours=True,
            ceilings=self.ceilings if self._header is None else self._header.ceilings,
            probed=probed[0] if probed else None,
            known=known,
        )
        if profile.verdict.bottleneck not in self.spec.bound_by:
            meant = " or ".join(self.spec.bound_by)
            raise BadInput(
                f"stock is bound by {profile.verdict.bottleneck}, not by {meant}: "
                f"{profile.verdict.summary}",
                fix="see that the machine is idle; else change the surface's load",
            )
        return profile

    def _identity(self) -> dict[str, JsonValue]:
        """What a recording must have in common with this bench, as JSON has it."""
        spec = self.spec
        shape = model_shape(str(self.model))
        info = self.engine.describe().model_copy(update={"python": None})
        return {
            "name": spec.name,
            "goal": spec.goal,
            "axes": [
                Axis(argument=axis.argument, values=axis.values, stock=axis.stock).model_dump(
                    mode="json"
                )
                for axis in spec.axes
            ],
            "base_arguments": dict(spec.base_arguments),
            "load": asdict(spec.load),
            "seed": spec.seed,
            "concurrency": spec.concurrency,
            "warmup_requests": spec.warmup_requests,
            "plan": dict(self.plan.key()),
            "model": self.model.name,
            "checkpoint": _checkpoint(self.model),
            "model_shape": {} if shape is None else asdict(shape),
            "device": self.device.model_dump(mode="json"),
            "engine": info.model_dump(mode="json"),
        }

    def _begun(self, began: datetime, found: Measurement, run: LoadRun, profile: Profile) -> Header:
        return Header.model_validate(
            {
                **self._identity(),
                "built": self.spec.built,
                "vocab_size": vocab_size(str(self.model)) or self.plan.vocab_size,
                "weight_bytes": weight_bytes(str(self.model)),
                "cpu_flags": [flag for flag in FLAGS if flag in cpu_flags()],
                "versions": {"kvtune": kvtune.__version__, "python": platform.python_version()},
                "effective": found.effective,
                "verdict": profile.verdict,
                "step_time": profile.step_time,
                "ceilings": self.ceilings,
                "max_concurrency": observed_concurrency(run),
                "began_at": began.isoformat(timespec="milliseconds"),
            }
        )


class _Watch:
    """How many cores others use between its making and `end`."""

    def __init__(self) -> None:
        self.others_cores = 0.0
        self._before = time.monotonic(), _machine_s(), _own_s()

    def end(self) -> None:
        """Look again; what this process started must still be running."""
        at_s, machine_s, own_s = self._before
        passed_s = time.monotonic() - at_s
        theirs_s = _machine_s() - machine_s - (_own_s() - own_s)
        self.others_cores = max(0.0, theirs_s / passed_s)


def quiet_or_late(busy_cores: float, wait_s: float) -> float:
    """Wait until others use at most so many cores, but not for ever; return how many they use."""
    until_s = time.monotonic() + wait_s
    while True:
        before_s = _machine_s()
        time.sleep(QUIET_S)
        cores = (_machine_s() - before_s) / QUIET_S
        if cores <= busy_cores or time.monotonic() > until_s:
            return cores


def _machine_s() -> float:
    """CPU seconds that the cores on which this process may run have computed so far."""
    every = psutil.cpu_times(percpu=True)
    cores = [every[number]._asdict() for number in psutil.Process().cpu_affinity()]
    return float(sum(core.get(name, 0.0) for core in cores for name in COMPUTING))


def _own_s() -> float:
    """CPU seconds of this process and all that it started and that still run."""
    own = psutil.Process()
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return float(total_s)


def _checkpoint(model: Path) -> str:
    """What tells a checkpoint from another one: names and sizes of its files."""
    files = sorted((file.name, file.stat().st_size) for file in model.iterdir() if file.is_file())
    return fingerprint_of(files)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _said(metrics: Mapping[str, tuple[float, ...]]) -> str:
    shown = {
        "goodput_requests_per_s": "good/s",
        "requests_per_s": "requests/s",
        "ttft_p95_s": "s p95 TTFT",
        "itl_p95_s": "s p95 ITL",
    }
    return ", ".join(f"{metrics[name][0]:.3g} {unit}" for name, unit in shown.items())
