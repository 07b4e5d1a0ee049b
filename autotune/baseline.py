"""What a search learns of its baseline before it tries anything: verdict, step costs, limits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtune.autotune.forecast.experience import probed_step_time
from kvtune.autotune.interrupts import Interrupts
from kvtune.autotune.profiling import device_ceilings, observed_concurrency, profile_baseline
from kvtune.autotune.reporting import Reporter
from kvtune.engines.base import RunningServer
from kvtune.kernels.device import detect_detail
from kvtune.policies.base import Context
from kvtune.policies.checkpoint import model_shape, vocab_size
from kvtune.profilers.load import runtime
from kvtune.profilers.measure import UNKNOWN_VOCAB_SIZE
from kvtune.profilers.probe import ProbeResult, probe
from kvtune.profilers.probe_plan import plan_probe
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Device,
    EffectiveConfig,
    Failure,
    FailureClass,
    LoadRun,
    Measurement,
    Profile,
    StepTimeModel,
    Trial,
    WorkloadFingerprint,
)

HOPELESS = (
    FailureClass.WRONG_MODEL,
    FailureClass.ENGINE_MISSING,
    FailureClass.BAD_ARGUMENT,
    FailureClass.PORT_TAKEN,
    FailureClass.HANG_AT_START,
)


def is_hopeless(baseline: Measurement) -> bool:
    """Whether the baseline failed in a way that no setting of ours can mend."""
    return baseline.failure is not None and baseline.failure.failure in HOPELESS


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
            known = self.known_step_time(found.effective)
            if self.probe_s and not self.saw_server and known is None:
                self.reporter.note(
                    "decode steps are not probed: the defaults were measured before, so that no "
                    "server of theirs runs; `kvtune profile` with the same arguments probes one"
                )
            profile = profile_baseline(
                self.study,
                trial,
                found.effective,
                runs[0],
                device=self.device,
                fingerprint=self.fingerprint,
                ceilings=self.store.ceilings(self.device.key),
                probed=self.probed,
                known=known,
            )
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
            max_concurrency=observed_concurrency(runs[0]) if runs else None,
        )
        return context, profile

    def known_step_time(self, effective: EffectiveConfig | None) -> StepTimeModel | None:
        """The newest model that a probe of the same engine in the same state gave, here."""
        return probed_step_time(
            [row.profile for row in self.store.profiles()],
            model=self.study.model,
            engine=self.study.engine,
            device=self.device,
            effective=effective,
        )
