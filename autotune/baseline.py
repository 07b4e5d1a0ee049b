"""What a search learns of its baseline before it tries anything: verdict, step costs, limits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtune.autotune.forecast.experience import probed_step_time
from kvtune.autotune.interrupts import Interrupts
from kvtune.autotune.ledger import RUNG_BASELINE, Entry, RequestSet
from kvtune.autotune.profiling import device_ceilings, observed_concurrency, profile_baseline
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.trial import AtServer
from kvtune.engines.base import RunningServer
from kvtune.errors import BadGoal
from kvtune.kernels.device import detect_detail
from kvtune.policies.base import Context
from kvtune.policies.checkpoint import model_shape, vocab_size
from kvtune.profilers.goal import slo_key, slo_text
from kvtune.profilers.load import runtime
from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE
from kvtune.profilers.probe import ProbeResult, probe
from kvtune.profilers.probe_plan import plan_probe
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Bottleneck,
    Device,
    EffectiveConfig,
    Failure,
    FailureClass,
    Goal,
    LoadRun,
    Measurement,
    PolicyStack,
    Profile,
    StepTimeModel,
    Trial,
    WorkloadFingerprint,
)

COMES_AGAIN = (
    FailureClass.BAD_ARGUMENT,
    FailureClass.DOES_NOT_FIT,
    FailureClass.ENGINE_MISSING,
    FailureClass.WRONG_MODEL,
)
"""Failures that another try cannot help."""

MENDABLE = (FailureClass.DOES_NOT_FIT, FailureClass.OUT_OF_MEMORY)
"""Failures of the baseline that a lever may mend, by taking less memory."""

NO_VALUE = {
    "itl": "no answer came in more than one piece, so that there are no gaps between tokens",
    "tpot": "no answer has more than one token",
}
"""Why a load that was served gives no value of a metric; any other has one for each request."""


def measure_baseline(
    so_far: SoFar, requests: RequestSet, reporter: Reporter, *, seed: int, afterwards: AtServer
) -> Entry:
    """Measure stock defaults, what all else is compared with: twice if another try may help."""

    def measure(*, again: bool) -> Entry:
        entry = so_far.ledger.run(
            PolicyStack(),
            requests,
            repeats=so_far.budget.repeats,
            seed=seed,
            rung=RUNG_BASELINE,
            canary=True,
            again=again,
            afterwards=afterwards,
        )
        reporter.trial(entry.trial, entry.measurement, reused=entry.reused)
        return entry

    reporter.phase(f"Measuring 1 of {so_far.budget.trials}: stock defaults")
    entry = measure(again=False)
    failure = entry.measurement.failure
    if failure is None or failure.failure in COMES_AGAIN:
        return entry
    if (entry.measurement.wall_s or 0.0) > so_far.left_s():
        return entry
    reporter.phase("Measuring the stock defaults once more, as they failed")
    return measure(again=True)


def without_value(goal: Goal, baseline: Measurement) -> BadGoal | None:
    """The error that refuses a goal which this load has no figures for, if it is one.

    A baseline that failed says nothing of that.
    """
    if baseline.failure is not None:
        return None
    for slo in goal.slos:
        if not baseline.metrics.get(slo_key(slo)):
            why = NO_VALUE.get(slo.metric, f"no request has a {slo.metric}")
            return BadGoal(
                f"{slo_text(slo)} cannot be measured with this load: {why}",
                "use requests with longer answers (--output-tokens, where they name no length), "
                "or limit ttft or e2e",
            )
    if baseline.metrics.get(goal.objective_metric):
        return None
    return BadGoal(
        f"{goal.objective} cannot be measured with this load: the stock defaults served it "
        f"without a value of {goal.objective_metric}",
        "use another objective, or a workload with more requests",
    )


def hopeless_reason(baseline: Measurement) -> str | None:
    """Why nothing else is to be tried: the baseline failed as no setting of ours can mend."""
    failure = baseline.failure
    if failure is None or failure.failure in MENDABLE:
        return None
    return (
        f"the search ends, no setting is known to mend this: {failure.failure}: {failure.message}"
    )


@dataclass(slots=True)
class BaselineLook:
    """Looks at the baseline of one study: its device, its server while that runs, then its load.

    The server is probed for at most `probe_s`, unless the history knows what its steps cost.
    """

    study: StudyRow
    store: Store
    device: Device
    fingerprint: WorkloadFingerprint
    reporter: Reporter
    interrupts: Interrupts
    probe_s: float
    probed: ProbeResult | None = field(default=None, init=False)
    saw_server: bool = field(default=False, init=False)

    def before_server(self) -> None:
        """Measure what the device reaches, unless the history knows it; nothing runs there yet."""
        device_ceilings(self.study.engine, self.device, self.store, self.reporter)

    def at_server(self, server: RunningServer) -> None:
        """Probe a server whose load was measured; whatever ends the probe, only it ends."""
        self.saw_server = True
        if self.known_step_time(server.effective) is not None:
            self.reporter.note("what decode steps cost is known from an earlier probe")
            return
        plan = plan_probe(server.effective, budget_s=self.probe_s)
        if plan.problem:
            self.reporter.note(f"decode steps are not probed: {plan.problem}")
            return
        self.reporter.note(f"probing decode steps: {plan.cost()}; Ctrl-C ends the probe too")

        def stopped() -> Failure | None:
            if self.interrupts.came:
                return Failure(failure=FailureClass.UNKNOWN, message="it was interrupted")
            return server.failure()

        self.probed = runtime.run(
            probe(
                server.endpoint,
                server.effective,
                budget_s=self.probe_s,
                salt=secrets.randbits(28),
                vocab_size=vocab_size(self.study.model) or UNKNOWN_VOCAB_SIZE,
                resets_cache=True,
                on_progress=self.reporter.load,
                should_stop=stopped,
            )
        )
        self.reporter.note(f"the probe took {self.probed.wall_s:.0f} s")

    def at_load(
        self, trial: Trial, found: Measurement, runs: Sequence[LoadRun]
    ) -> tuple[Context, Profile | None]:
        """What policies may ask about, and the profile of the load; none of a load that failed."""
        profile = None
        if runs:
            is_known = self.known_step_time(found.effective) is not None
            if self.probe_s and not self.saw_server and not is_known:
                self.reporter.note(
                    "decode steps are not probed: the defaults were measured before, so that no "
                    "server of theirs runs; `kvtune profile` with the same arguments probes one"
                )
            profile = self._profile(trial, found, runs[0], self.probed)
            self.store.save_profile(profile)
            self.reporter.verdict(profile.verdict)
        context = Context(
            engine=self.study.engine,
            device=self.device,
            detail=detect_detail(),
            model=model_shape(self.study.model),
            baseline=found.effective,
            base_arguments=self.study.base_arguments,
            fingerprint=self.fingerprint,
            verdict=None if profile is None else profile.verdict,
            max_concurrency=observed_concurrency(runs[0]) if runs and not found.boundary else None,
        )
        return context, profile

    def bound_by(self, entry: Entry, run: LoadRun) -> str:
        """What a trial's load was bound by, in words; empty without a verdict."""
        verdict = self._profile(entry.trial, entry.measurement, run, probed=None).verdict
        return "" if verdict.bottleneck is Bottleneck.ABSTAIN else verdict.summary

    def _profile(
        self, trial: Trial, found: Measurement, run: LoadRun, probed: ProbeResult | None
    ) -> Profile:
        return profile_baseline(
            self.study,
            trial,
            found.effective,
            run,
            device=self.device,
            fingerprint=self.fingerprint,
            ceilings=self.store.ceilings(self.device.key),
            probed=probed,
            known=self.known_step_time(found.effective),
        )

    def known_step_time(self, effective: EffectiveConfig | None) -> StepTimeModel | None:
        """The newest model that a probe of the same engine in the same state gave, here."""
        return probed_step_time(
            [row.profile for row in self.store.profiles()],
            model=self.study.model,
            engine=self.study.engine,
            device=self.device,
            effective=effective,
        )
