"""The whole search, readable from top to bottom: baseline, verdict, trials, confirmation, decision.

A configuration that changes answers is only ever chosen when it answers the long-prompt canary and
the questions of the quality suites as well as stock settings do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtune.autotune.baseline import (
    BaselineLook,
    hopeless_reason,
    measure_baseline,
    without_value,
)
from kvtune.autotune.climb import Climbs
from kvtune.autotune.conclude import conclude
from kvtune.autotune.confirm import CONFIRMATION_SEED, confirm, confirmed_before
from kvtune.autotune.early_stop import EarlyStop, finish_cut
from kvtune.autotune.explore.kin import kin_of
from kvtune.autotune.explore.loop import Exploration
from kvtune.autotune.explore.sampler import proposer_by, proposer_text
from kvtune.autotune.forecast.foresight import Foresight, foresight_of
from kvtune.autotune.judging import judge_finalists
from kvtune.autotune.ledger import RUNG_LOSSLESS, Entry, Ledger, RequestSet, TrialRunner
from kvtune.autotune.limits import Budget, Rules
from kvtune.autotune.missed import Confirmed, closest, missed_before
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.search import Search
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.spending import trial_s
from kvtune.autotune.standing import meeting
from kvtune.autotune.steps import KeepsSteps
from kvtune.autotune.trial import Bench, run_trial
from kvtune.engines.base import RunningServer
from kvtune.policies.base import Context
from kvtune.profilers.fingerprint import fingerprint
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Decision,
    Device,
    Harm,
    Measurement,
    Regret,
    Request,
    Trial,
    Workload,
)


@dataclass(slots=True)
class Tuning:
    """One search of one study on one bench; `run` is the whole of it.

    `runner` measures its trials.
    """

    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    device: Device
    budget: Budget
    rules: Rules
    clock: Callable[[], float] = time.monotonic
    runner: TrialRunner = run_trial
    ledger: Ledger = field(init=False)
    so_far: SoFar = field(init=False)
    tuning_set: RequestSet = field(init=False)
    heldout_set: RequestSet = field(init=False)
    foresight: Foresight = field(init=False)
    keeper: KeepsSteps = field(init=False)
    look: BaselineLook = field(init=False)
    quality: TrialQuality | None = field(init=False, default=None)
    exploration: Exploration | None = field(init=False, default=None)
    interrupted: bool = field(init=False, default=False)
    known: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        is_fixed = not self.bench.plan.at_boundary
        self.ledger = Ledger(
            self.store,
            self.study,
            self.bench,
            remeasure=self.rules.remeasure,
            run=self.runner if is_fixed else Climbs(lambda: self.so_far, self.rules.may_cut),
        )
        self.tuning_set = _request_set(self.workload.requests)
        self.heldout_set = _request_set(self.workload.heldout or self.workload.requests)
        self.foresight = foresight_of(self.store, self.study, self.bench.plan)
        self.keeper = KeepsSteps(self.reporter, self.store, self.study)
        self.look = BaselineLook(
            self.study,
            self.store,
            self.device,
            self.workload.fingerprint,
            self.keeper,
            self.bench.interrupts,
            self.budget.probe_limit_s,
        )
        if self.rules.quality is not None:
            self.quality = TrialQuality(
                self.rules.quality,
                self.study,
                self.store,
                self.bench,
                self.workload,
                self.rules.seed,
                reuse=not self.rules.remeasure,
            )
        self.so_far = SoFar(
            self.study.goal,
            self.ledger,
            self.budget,
            self.quality,
            self.clock,
            also=self.rules.also,
        )
        if self.rules.may_cut and is_fixed:
            self.ledger.watch = EarlyStop(self.so_far).watch

    @property
    def reporter(self) -> Reporter:
        """Where progress goes."""
        return self.bench.reporter

    def run(self) -> Decision:
        """Search within the budget and decide. An interrupt ends it with the best so far.

        The next one is then ignored until the decision is saved.

        Raises:
            BadGoal: the load has no figures for the goal.
        """
        limit_s = math.inf if self.budget.time_s is None else self.budget.time_s
        self.so_far.until_s = self.clock() + limit_s
        self.store.abandon_running(self.study)
        self.known = len(self.so_far.tried)
        try:
            baseline = self._baseline()
            context = self._context(baseline)
            confirmed: Confirmed = {}
            if reason := hopeless_reason(baseline.measurement):
                self.keeper.step("stop", reason)
            else:
                if not self.rules.may_cut:
                    finish_cut(self.so_far, self.tuning_set, self.reporter)
                confirmed = self._searched(baseline, context)
        except KeyboardInterrupt:
            self.interrupted = True
            with self.bench.interrupts.first_ignored():
                self.reporter.phase("Interrupted: deciding with what was measured")
                return self._conclude(confirmed_before(self.ledger, self.rules.seed))
        with self.bench.interrupts.first_ignored():
            return self._conclude(confirmed)

    # --- the parts, in order ---

    def _baseline(self) -> Entry:
        """Measure stock defaults, and refuse a goal that they show to be without a value."""
        self.look.before_server()
        entry = measure_baseline(
            self.so_far,
            self.tuning_set,
            self.keeper,
            seed=self.rules.seed,
            afterwards=self._at_baseline,
        )
        if error := without_value(self.study.goal, entry.measurement):
            raise error
        return entry

    def _at_baseline(
        self, trial: Trial, server: RunningServer, measurement: Measurement
    ) -> Measurement:
        """Probe the baseline, and ask it where its answers will be needed for sure.

        Else it is asked only once a lever is tried that may change answers, which it mostly is not.
        """
        if without_value(self.study.goal, measurement):
            return measurement
        if self.look.probe_s:
            self.look.at_server(server)
        if self.quality is not None and self.rules.explore_lossy:
            return self.quality.at_server(trial, server, measurement)
        return measurement

    def _context(self, baseline: Entry) -> Context:
        """What the policies may ask about, with the verdict on the baseline's load."""
        runs = self.ledger.runs(baseline.trial, self.tuning_set, canary=True)
        found = baseline.measurement
        context, profile = self.look.at_load(baseline.trial, found, runs)
        scores = "" if self.quality is None else self.quality.scores_limit
        context = replace(context, max_host_bytes=self.rules.max_host_bytes, scores_limit=scores)
        if profile is not None and found.boundary is None:  # Forecasts are of one load.
            requests = self.tuning_set.requests
            self.foresight.learn(requests, runs[0], found, context, profile.step_time)
        return context

    def _searched(self, baseline: Entry, context: Context) -> Confirmed:
        """Explore, then confirm; and once more with other settings while nothing passes that.

        Confirmations that nothing passed stay as they are: the same command finds them again.
        """
        missed = self._missed()
        exploration = self._exploration(context)
        exploration.run()
        while not missed or self._has_contender():
            confirmed = self._confirmed(baseline, len(missed))
            before, missed = len(missed), self._missed()
            if len(missed) == before:
                return confirmed or (closest(self.study.goal, missed) if missed else {})
            exploration.reopen()
        return closest(self.study.goal, missed)

    def _missed(self) -> list[Confirmed]:
        """The confirmations so far that nothing passed; all that follows knows of them."""
        found = missed_before(
            self.ledger,
            self.study.goal,
            self.so_far.distinct,
            rounds=self.budget.confirm_rounds,
            seed=self.rules.seed,
        )
        self.so_far.missed = {number: one for each in found for number, one in each.items()}
        return found

    def _has_contender(self) -> bool:
        """Whether a trial is left that may pass a confirmation."""
        found = meeting(self.study.goal, self.so_far.contenders, self.so_far.gates)
        return any(entry.trial.number for entry in found)

    def _exploration(self, context: Context) -> Exploration:
        goal, seed = self.study.goal, self.rules.seed
        if self.bench.plan.at_boundary:  # Limits are just met there: what they cost is the load.
            goal = goal.model_copy(update={"slos": ()})
        forecaster = self.foresight.forecaster
        proposer = proposer_by(self.rules, forecaster, goal, context)
        self.keeper.note(proposer_text(self.rules, forecaster, proposer))
        self.exploration = Exploration(
            self.so_far,
            self.rules,
            self.tuning_set,
            context,
            Search(self.study.name, self.store.url, seed=seed, also=self.rules.also),
            self.foresight,
            self.keeper,
            kin_of(self.study, self.store),
            proposer,
        )
        return self.exploration

    def _confirmed(self, baseline: Entry, before: int) -> Confirmed:
        """Measure the finalists again, after `before` confirmations that nothing passed."""
        found = self.so_far.finals()
        if found.says:
            self.keeper.note(found.says)
        if self.quality is not None:
            self.quality.begin_finals(found.chosen, found.left_out, found.asking_s)
        trials = [entry.trial for entry in found.chosen]
        if baseline.measurement.failure is None:
            trials.insert(0, baseline.trial)
        may_harm = any(trial.stack.harm is not Harm.LOSSLESS for trial in trials)
        confirmed = confirm(
            trials,
            self.ledger,
            self.heldout_set,
            self.keeper,
            goal=self.study.goal,
            rounds=self.budget.confirm_rounds,
            seed=self.rules.seed + CONFIRMATION_SEED * before,
            clock=self.clock,
            trial_s=trial_s(self.so_far.points),
            until_s=self.so_far.until_s,
            afterwards=self.quality.at_server if self.quality and may_harm else None,
        )
        if quality := self.so_far.judging:
            entries = [entry for entry in found.chosen if entry.trial.number in confirmed]
            judge_finalists(entries, quality, self.so_far.left_s, self.keeper)
        return confirmed

    def _conclude(self, confirmed: Confirmed) -> Decision:
        flight = self.bench.plan.concurrency
        decision = conclude(
            self.so_far,
            confirmed,
            self.workload,
            concurrency=flight,
            bound_by=self._bound_by,
            regret=self._regret,
            untried="" if self.exploration is None else self.exploration.untried(),
        )
        self.store.save_decision(self.study, decision)
        if self.exploration is not None:
            self.exploration.advice.end()
        return decision

    def _bound_by(self, number: int) -> str:
        """What the run of a trial was bound by, in words; empty if it was not kept."""
        entry = next(entry for entry in self.so_far.points if entry.trial.number == number)
        canary = entry.rung != RUNG_LOSSLESS
        runs = self.ledger.runs(entry.trial, self.tuning_set, canary=canary)
        return self.look.bound_by(entry, runs[0]) if runs else ""

    def _regret(self, trial: Trial) -> Regret | None:
        """How far a trial may be from the best one; who interrupts does not wait for it.

        A search that measured nothing has nothing new to say.
        """
        before = self.store.decision(self.study)
        is_new = len(self.so_far.tried) != self.known
        if not is_new and before is not None and before.recommended == trial.number:
            return before.regret
        if self.exploration is None or self.interrupted:
            return None
        return self.exploration.regret(trial.stack.arguments)


def _request_set(requests: tuple[Request, ...]) -> RequestSet:
    return RequestSet(requests, fingerprint(requests).digest)
