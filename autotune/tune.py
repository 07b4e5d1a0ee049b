"""The whole search, readable from top to bottom: baseline, verdict, trials, confirmation, decision.

Lossless levers come first. Near-lossless ones are unlocked when the lossless trials miss the goal,
or when the user asks for them. A configuration that changes answers is only ever chosen when the
long-prompt canary answers as well as with stock settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from pydantic import JsonValue

from kvtune.autotune.baseline import BaselineLook
from kvtune.autotune.canary_gate import Canary
from kvtune.autotune.confirm import confirm, confirmed_before
from kvtune.autotune.decide import (
    Candidate,
    decide,
    mean_metrics,
    meets_goal,
    objective_values,
)
from kvtune.autotune.forecast.foresight import Foresight, foresight_of
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
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.search import Proposal, Search
from kvtune.autotune.space import SearchSpace, build_space, infeasible_reason, stack_from
from kvtune.autotune.trial import Bench
from kvtune.policies.base import Context
from kvtune.policies.stack import describe
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.goal import goal_violations
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import (
    Decision,
    Device,
    FailureClass,
    Harm,
    Measurement,
    PolicyStack,
    Request,
    Workload,
)

HOPELESS = (
    FailureClass.WRONG_MODEL,
    FailureClass.ENGINE_MISSING,
    FailureClass.BAD_ARGUMENT,
    FailureClass.PORT_TAKEN,
    FailureClass.HANG_AT_START,
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
            if not self._is_hopeless(baseline.measurement):
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
        canary = Canary(baseline.measurement)
        exhausted = False
        while self._affords_another(began_s):
            unlocked = self._unlocked(lossless, widest, exhausted=exhausted)
            space = widest if unlocked else lossless
            if not space.knobs:
                self.reporter.note("nothing can be searched here: " + _refusals(space))
                return
            proposal, stack = self._propose(search, space, context, canary)
            if proposal is not None:
                self._try(search, proposal, stack, canary)
            elif unlocked or not self._unlocked(lossless, widest, exhausted=True):
                self.reporter.note("every configuration of this space was measured or cannot run")
                return
            else:
                exhausted = True

    def _propose(
        self, search: Search, space: SearchSpace, context: Context, canary: Canary
    ) -> tuple[Proposal | None, PolicyStack]:
        """A point that was not measured yet; what cannot fit is told to the sampler unmeasured."""
        for _ in range(SAMPLER_TRIES):
            proposal = search.ask(space)
            stack = stack_from(space, proposal.values, context)
            if (known := self._known(stack)) is not None:
                self._tell(search, proposal, known, canary)
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

    def _try(self, search: Search, proposal: Proposal, stack: PolicyStack, canary: Canary) -> None:
        rung = RUNG_LOSSLESS if stack.harm is Harm.LOSSLESS else RUNG_NEAR_LOSSLESS
        number = len(self._points()) + 1
        self.reporter.phase(f"Measuring {number} of {self.budget.trials}: {describe(stack)}")
        self.foresight.tell(stack)
        try:
            entry = self._measure(stack, rung, proposal.optuna_number)
        except KeyboardInterrupt:
            search.tell_stopped(proposal)
            raise
        if reason := canary.objection(entry.trial.stack, entry.measurement):
            self.reporter.note(f"trial {entry.trial.number} is out: {reason}")
        if not entry.reused:
            self.foresight.measured(entry.trial, entry.measurement)
        self._tell(search, proposal, entry, canary)

    def _confirmed(self, baseline: Entry, began_s: float) -> dict[int, Measurement]:
        trials = [entry.trial for entry in self._ranked()[: self.budget.finalists]]
        if baseline.measurement.failure is None:
            trials.insert(0, baseline.trial)
        time_s = self.budget.time_s
        return confirm(
            trials,
            self.ledger,
            self.heldout_set,
            self.reporter,
            rounds=self.budget.confirm_rounds,
            seed=self.rules.seed,
            clock=self.clock,
            round_s=self._trial_s() * len(trials),
            until_s=None if time_s is None else began_s + time_s,
        )

    def _decide(self, confirmed: dict[int, Measurement]) -> Decision:
        points = self._points()
        rejected = self._rejected(points, confirmed)
        final = [
            Candidate(number, entry.trial.stack, confirmed.get(number, entry.measurement))
            for entry in points
            if (number := entry.trial.number) == 0 or number not in rejected
        ]
        stock = final.pop(0) if final and final[0].number == 0 else None
        decision = decide(self.study.goal, stock, final, rejected)
        doubts = self._doubts(confirmed)
        return decision.model_copy(update={"reasons": (*decision.reasons, *doubts)})

    def _doubts(self, confirmed: dict[int, Measurement]) -> list[str]:
        """What a reader of the decision should know about the requests behind it."""
        if not confirmed:
            return ["nothing was confirmed: each configuration was measured on its own"]
        if not self.workload.heldout:
            return ["confirmed on the requests of the search: none were held out"]
        flight = self.bench.plan.concurrency
        if flight is not None and len(self.workload.heldout) < 2 * flight:
            return [
                f"confirmed on {len(self.workload.heldout)} held-out requests, fewer than two for "
                f"each of the {flight} in flight: a lighter load than the search's"
            ]
        return []

    # --- small questions ---

    def _is_hopeless(self, baseline: Measurement) -> bool:
        """Whether the baseline failed in a way that no setting of ours can mend."""
        failure = baseline.failure
        if failure is None or failure.failure not in HOPELESS:
            return False
        self.reporter.note("nothing else is tried: no setting mends this")
        return True

    def _measure(self, stack: PolicyStack, rung: int, optuna_number: int | None = None) -> Entry:
        entry = self.ledger.run(
            stack,
            self.tuning_set,
            repeats=self.budget.repeats,
            seed=self.rules.seed,
            rung=rung,
            canary=rung in (RUNG_BASELINE, RUNG_NEAR_LOSSLESS),
            optuna_number=optuna_number,
            afterwards=self.look.at_server if rung == RUNG_BASELINE and self.look.probe_s else None,
        )
        self.reporter.trial(entry.trial, entry.measurement, reused=entry.reused)
        return entry

    def _points(self) -> list[Entry]:
        """The measured trials without the confirmations."""
        return [entry for entry in self.ledger.entries if entry.trial.parent is None]

    def _known(self, stack: PolicyStack) -> Entry | None:
        for entry in self._points():
            if entry.trial.stack.arguments == stack.arguments:
                return entry
        return None

    def _tell(self, search: Search, proposal: Proposal, entry: Entry, canary: Canary) -> None:
        values = objective_values(self.study.goal, entry.measurement)
        if not values or canary.objection(entry.trial.stack, entry.measurement):
            search.tell_failed(proposal)
            return
        violations = goal_violations(self.study.goal, mean_metrics(entry.measurement)).values()
        search.tell(
            proposal,
            sum(values) / len(values),
            [1.0 if violation is None else violation for violation in violations],
        )

    def _ranked(self) -> list[Entry]:
        """Measured trials beside the baseline: that meet the goal first, then by objective."""
        goal = self.study.goal
        rejected = self._rejected(self._points(), {})
        measured = [
            entry
            for entry in self._points()
            if entry.trial.number
            and entry.trial.number not in rejected
            and objective_values(goal, entry.measurement)
        ]

        def rank(entry: Entry) -> tuple[bool, float]:
            values = objective_values(goal, entry.measurement)
            return meets_goal(goal, entry.measurement), sum(values) / len(values)

        return sorted(measured, key=rank, reverse=True)

    def _rejected(self, points: list[Entry], confirmed: dict[int, Measurement]) -> dict[int, str]:
        stock = next((entry for entry in points if entry.trial.number == 0), None)
        canary = Canary(stock.measurement if stock is not None else None)
        rejected = {}
        for entry in points:
            final = confirmed.get(entry.trial.number, entry.measurement)
            if final.failure is not None:
                rejected[entry.trial.number] = f"{final.failure.failure}: {final.failure.message}"
            elif reason := canary.objection(entry.trial.stack, entry.measurement):
                rejected[entry.trial.number] = reason
            elif confirmed and entry.trial.number not in confirmed:
                rejected[entry.trial.number] = "not among the best when it was tried"
        return rejected

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
        runs_left = self.budget.confirm_rounds * (self.budget.finalists + 1)
        needed_s = self._trial_s() * (1 + runs_left / self.budget.repeats)
        if self.clock() - began_s + needed_s <= self.budget.time_s:
            return True
        self.reporter.note(
            f"the time budget is spent after {len(points)} trials: "
            f"what is left goes to the confirmation"
        )
        return False

    def _trial_s(self) -> float:
        """What a trial took so far, as the median."""
        walls = [e.measurement.wall_s for e in self._points() if e.measurement.wall_s is not None]
        return median(walls) if walls else 0.0


def _request_set(requests: tuple[Request, ...]) -> RequestSet:
    return RequestSet(requests, fingerprint(requests).digest)


def _refusals(space: SearchSpace) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in space.refusals.items())
