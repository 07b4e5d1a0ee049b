"""The whole search, readable from top to bottom: baseline, verdict, trials, confirmation, decision.

Lossless levers come first. Near-lossless ones are unlocked when the lossless trials miss the goal,
or when the user asks for them. A configuration that changes answers is only ever chosen when it
answers the long-prompt canary and the questions of the quality suites as well as stock settings do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvtune.autotune.baseline import BaselineLook, is_hopeless
from kvtune.autotune.confirm import confirm, confirmed_before
from kvtune.autotune.decide import (
    Candidate,
    decide,
    doubts,
    mean_metrics,
    meets_goal,
    objective_values,
)
from kvtune.autotune.forecast.foresight import Foresight, foresight_of
from kvtune.autotune.gates import Gates
from kvtune.autotune.guesses import first_guesses
from kvtune.autotune.ledger import (
    RUNG_BASELINE,
    RUNG_LOSSLESS,
    RUNG_NEAR_LOSSLESS,
    Entry,
    Ledger,
    RequestSet,
)
from kvtune.autotune.limits import Budget, Rules
from kvtune.autotune.quality.trials import TrialQuality
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.search import Proposal, Search
from kvtune.autotune.space import SearchSpace, build_space, infeasible_reason, stack_from
from kvtune.autotune.spending import confirmation_s, needed_s, trial_s
from kvtune.autotune.standing import finalists, rejected
from kvtune.autotune.trial import AtServer, Bench
from kvtune.engines.base import RunningServer
from kvtune.policies.base import Context
from kvtune.policies.stack import describe
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import goal_violations
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Decision,
    Device,
    Harm,
    Measurement,
    PolicyStack,
    Request,
    Trial,
    Workload,
)

LOSSLESS_SHARE = 0.6
"""Share of the budget after which a goal that lossless levers miss unlocks the next rung."""

SAMPLER_TRIES = 10
"""How often the sampler may propose what is known before a new point is drawn blindly."""


@dataclass(slots=True)
class Tuning:
    """One search of one study on one bench; `run` is the whole of it."""

    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    device: Device
    budget: Budget
    rules: Rules
    clock: Callable[[], float] = time.monotonic
    ledger: Ledger = field(init=False)
    tuning_set: RequestSet = field(init=False)
    heldout_set: RequestSet = field(init=False)
    foresight: Foresight = field(init=False)
    look: BaselineLook = field(init=False)
    quality: TrialQuality | None = field(init=False, default=None)
    refused: set[str] = field(default_factory=set)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.store, self.study, self.bench, remeasure=self.rules.remeasure)
        self.tuning_set = _request_set(self.workload.requests)
        self.heldout_set = _request_set(self.workload.heldout or self.workload.requests)
        self.foresight = foresight_of(self.store, self.study, self.bench.plan)
        self.look = BaselineLook(
            self.study,
            self.store,
            self.device,
            self.workload.fingerprint,
            self.reporter,
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

    def run(self) -> Decision:
        """Search within the budget and decide. An interrupt ends it with the best so far.

        The next one is then ignored until the decision is saved.
        """
        began_s = self.clock()
        self.store.abandon_running(self.study)
        try:
            self.reporter.phase(f"Measuring 1 of {self.budget.trials}: stock defaults")
            baseline = self._measure(PolicyStack(), RUNG_BASELINE)
            context = self._context(baseline)
            confirmed = {}
            if is_hopeless(baseline.measurement):
                self.reporter.note("nothing else is tried: no setting mends this")
            else:
                self._search(context, baseline, began_s)
                confirmed = self._confirmed(baseline, began_s)
        except KeyboardInterrupt:
            self.interrupted = True
            with self.bench.interrupts.first_ignored():
                self.reporter.phase("Interrupted: deciding with what was measured")
                return self._conclude(confirmed_before(self.ledger))
        return self._conclude(confirmed)

    def _conclude(self, confirmed: dict[int, Measurement]) -> Decision:
        decision = self._decide(confirmed)
        self.store.save_decision(self.study, decision)
        return decision

    @property
    def reporter(self) -> Reporter:
        """Where progress goes."""
        return self.bench.reporter

    # --- the parts, in order ---

    def _context(self, baseline: Entry) -> Context:
        """What the policies may ask about, with the verdict on the baseline's load."""
        runs = self.ledger.runs(baseline.trial, self.tuning_set, canary=True)
        found = baseline.measurement
        context, profile = self.look.at_load(baseline.trial, found, runs)
        if profile is not None:
            requests = self.tuning_set.requests
            self.foresight.learn(requests, runs[0], found, context, profile.step_time)
        return context

    def _search(self, context: Context, baseline: Entry, began_s: float) -> None:
        lossless = build_space(context, harm=Harm.LOSSLESS)
        widest = build_space(context, harm=self.rules.max_harm)
        search = Search(self.study.name, self.store.url, seed=self.rules.seed)
        search.recover()
        search.suggest_first(lossless, lossless.defaults)
        if context.verdict is not None:
            for values in first_guesses(lossless, context.verdict.bottleneck):
                search.suggest_first(lossless, values)
        gates = Gates(baseline.measurement, self.quality)
        self._judge(self._points())
        exhausted = False
        while self._affords_another(began_s):
            unlocked = self._unlocked(lossless, widest, exhausted=exhausted)
            space = widest if unlocked else lossless
            if not space.knobs:
                why = "; ".join(f"{name}: {reason}" for name, reason in space.refusals.items())
                self.reporter.note(f"nothing can be searched here: {why}")
                return
            proposal, stack = self._propose(search, space, context, gates)
            if proposal is not None:
                self._try(search, proposal, stack, gates)
            elif unlocked or not self._unlocked(lossless, widest, exhausted=True):
                self.reporter.note("every configuration of this space was measured or cannot run")
                return
            else:
                exhausted = True

    def _propose(
        self, search: Search, space: SearchSpace, context: Context, gates: Gates
    ) -> tuple[Proposal | None, PolicyStack]:
        """A point that was not measured yet; what cannot fit is told to the sampler unmeasured."""
        for _ in range(SAMPLER_TRIES):
            proposal = search.ask(space)
            stack = stack_from(space, proposal.values, context)
            if (known := self._known(stack)) is not None:
                self._tell(search, proposal, known, gates)
            elif reason := infeasible_reason(stack, context):
                self._refuse(stack, reason)
                search.tell_failed(proposal)
            else:
                return proposal, stack

        def is_new(values: Mapping[str, JsonValue]) -> bool:
            stack = stack_from(space, values, context)
            return self._known(stack) is None and infeasible_reason(stack, context) is None

        drawn = search.ask_new(space, is_new)
        return drawn, PolicyStack() if drawn is None else stack_from(space, drawn.values, context)

    def _refuse(self, stack: PolicyStack, reason: str) -> None:
        if reason not in self.refused:
            self.refused.add(reason)
            self.reporter.note(f"not launched, {describe(stack)} and others alike: {reason}")

    def _try(self, search: Search, proposal: Proposal, stack: PolicyStack, gates: Gates) -> None:
        rung = RUNG_LOSSLESS if stack.harm is Harm.LOSSLESS else RUNG_NEAR_LOSSLESS
        number = len(self._points()) + 1
        self.reporter.phase(f"Measuring {number} of {self.budget.trials}: {describe(stack)}")
        self.foresight.tell(stack)
        try:
            entry = self._measure(stack, rung, proposal.optuna_number)
            if not entry.reused:
                self.foresight.measured(entry.trial, entry.measurement)
            self._judge([entry])
        except KeyboardInterrupt:
            search.tell_stopped(proposal)
            raise
        if reason := gates.objection(entry):
            self.reporter.note(f"trial {entry.trial.number} is out: {reason}")
        self._tell(search, proposal, entry, gates)

    def _confirmed(self, baseline: Entry, began_s: float) -> dict[int, Measurement]:
        chosen = self._finalists(began_s)
        trials = [entry.trial for entry in chosen]
        if baseline.measurement.failure is None:
            trials.insert(0, baseline.trial)
        time_s = self.budget.time_s
        may_harm = any(trial.stack.harm is not Harm.LOSSLESS for trial in trials)
        confirmed = confirm(
            trials,
            self.ledger,
            self.heldout_set,
            self.reporter,
            rounds=self.budget.confirm_rounds,
            seed=self.rules.seed,
            clock=self.clock,
            round_s=trial_s(self._points()) * len(trials),
            asking_s=self.quality.expected_s(chosen) if self.quality else 0.0,
            until_s=None if time_s is None else began_s + time_s,
            afterwards=self.quality.at_server if self.quality and may_harm else None,
        )
        self._judge([entry for entry in chosen if entry.trial.number in confirmed], final=True)
        return confirmed

    def _judge(self, entries: list[Entry], *, final: bool = False) -> None:
        """Have the answers of trials judged; without a baseline they cannot be."""
        stock = self._stock()
        if self.quality is None or stock is None or stock.failure is not None:
            return
        for entry in entries:
            self.quality.judge(entry, final=final)

    def _decide(self, confirmed: dict[int, Measurement]) -> Decision:
        points = self._points()
        out = rejected(points, Gates(self._stock(), self.quality), confirmed)
        final = [
            Candidate(number, entry.trial.stack, confirmed.get(number, entry.measurement))
            for entry in points
            if (number := entry.trial.number) == 0 or number not in out
        ]
        stock = final.pop(0) if final and final[0].number == 0 else None
        decision = decide(self.study.goal, stock, final, out)
        flight = self.bench.plan.concurrency
        more = [
            *self._vouched(decision),
            *doubts(self.workload, flight, is_confirmed=bool(confirmed)),
        ]
        return decision.model_copy(update={"reasons": (*decision.reasons, *more)})

    def _vouched(self, decision: Decision) -> list[str]:
        """What is known of the answers of recommended settings that may change them."""
        chosen = [e.trial for e in self._points() if e.trial.number == decision.recommended]
        if not chosen or chosen[0].stack.harm is Harm.LOSSLESS:
            return []
        found = None if self.quality is None else self.quality.verdict(chosen[0].number)
        return [found or "its answers were checked by the long-prompt canary only"]

    # --- small questions ---

    def _measure(self, stack: PolicyStack, rung: int, optuna_number: int | None = None) -> Entry:
        entry = self.ledger.run(
            stack,
            self.tuning_set,
            repeats=self.budget.repeats,
            seed=self.rules.seed,
            rung=rung,
            canary=rung in (RUNG_BASELINE, RUNG_NEAR_LOSSLESS),
            optuna_number=optuna_number,
            afterwards=self._afterwards(rung),
        )
        self.reporter.trial(entry.trial, entry.measurement, reused=entry.reused)
        return entry

    def _afterwards(self, rung: int) -> AtServer | None:
        """What is done at a server once it was measured."""
        if rung == RUNG_BASELINE:
            return self._at_baseline
        stock = self._stock()
        may_ask = rung == RUNG_NEAR_LOSSLESS and stock is not None and stock.failure is None
        return self.quality.at_server if self.quality is not None and may_ask else None

    def _at_baseline(
        self, trial: Trial, server: RunningServer, measurement: Measurement
    ) -> Measurement:
        """Probe the baseline, and ask it where its answers will be needed for sure.

        Else it is asked only once a lever is tried that may change answers, which it mostly is not.
        """
        if self.look.probe_s:
            self.look.at_server(server)
        if self.quality is not None and self.rules.explore_lossy:
            return self.quality.at_server(trial, server, measurement)
        return measurement

    def _points(self) -> list[Entry]:
        """The measured trials without the confirmations."""
        return [entry for entry in self.ledger.entries if entry.trial.parent is None]

    def _finalists(self, began_s: float) -> list[Entry]:
        """What to confirm: nothing that may change answers where there is no time to ask it."""
        points = self._points()
        gates = Gates(self._stock(), self.quality)
        chosen = finalists(self.study.goal, points, gates, self.budget.finalists)
        if self.quality is None or self.budget.time_s is None:
            return chosen
        asking_s = self.quality.expected_s(chosen)
        left_s = self.budget.time_s - (self.clock() - began_s)
        if not asking_s or asking_s + confirmation_s(points, self.budget) <= left_s:
            return chosen
        self.quality.leave_out(chosen, asking_s)
        lossless = [entry for entry in points if entry.trial.stack.harm is Harm.LOSSLESS]
        return finalists(self.study.goal, lossless, gates, self.budget.finalists)

    def _stock(self) -> Measurement | None:
        """The baseline's measurement, once there is one."""
        return next((e.measurement for e in self._points() if e.trial.number == 0), None)

    def _known(self, stack: PolicyStack) -> Entry | None:
        for entry in self._points():
            if entry.trial.stack.arguments == stack.arguments:
                return entry
        return None

    def _tell(self, search: Search, proposal: Proposal, entry: Entry, gates: Gates) -> None:
        values = objective_values(self.study.goal, entry.measurement)
        if not values or gates.objection(entry):
            search.tell_failed(proposal)
            return
        violations = goal_violations(self.study.goal, mean_metrics(entry.measurement)).values()
        search.tell(
            proposal,
            sum(values) / len(values),
            [1.0 if violation is None else violation for violation in violations],
        )

    def _unlocked(self, lossless: SearchSpace, widest: SearchSpace, *, exhausted: bool) -> bool:
        """Whether near-lossless levers may be tried now; `exhausted`: lossless ones all were."""
        if self.rules.explore_lossy or not lossless.knobs:
            return True
        points = self._points()
        tried_enough = exhausted or len(points) >= LOSSLESS_SHARE * self.budget.trials
        goal_met = any(
            meets_goal(self.study.goal, e.measurement)
            for e in points
            if e.trial.stack.harm is Harm.LOSSLESS
        )
        return len(widest.knobs) > len(lossless.knobs) and tried_enough and not goal_met

    def _affords_another(self, began_s: float) -> bool:
        points = self._points()
        if len(points) >= self.budget.trials:
            return False
        if self.budget.time_s is None:
            return True
        next_s = needed_s(points, self._finalists(began_s), self.budget, self.quality)
        if self.clock() - began_s + next_s <= self.budget.time_s:
            return True
        self.reporter.note(
            f"the time budget is spent after {len(points)} trials: "
            f"what is left goes to the confirmation"
        )
        return False


def _request_set(requests: tuple[Request, ...]) -> RequestSet:
    return RequestSet(requests, fingerprint(requests).digest)
