"""The whole search, readable from top to bottom: baseline, verdict, trials, confirmation, decision.

Lossless levers come first. Near-lossless ones are unlocked when the lossless trials miss the goal,
or when the user asks for them. A configuration that changes answers is only ever chosen when it
answers the long-prompt canary and the questions of the quality suites as well as stock settings do.
"""

from __future__ import annotations

import math
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
    objective_values,
)
from kvtune.autotune.forecast.foresight import Foresight, foresight_of
from kvtune.autotune.gates import Gates
from kvtune.autotune.guesses import first_guesses
from kvtune.autotune.judging import judge_earlier, judge_finalists
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
from kvtune.autotune.spending import Finals, finals, needed_s, trial_s
from kvtune.autotune.standing import is_met_without_harm, rejected
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
    until_s: float = field(init=False, default=math.inf)
    noted: set[str] = field(default_factory=set)
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
        if self.budget.time_s is not None:
            self.until_s = self.clock() + self.budget.time_s
        self.store.abandon_running(self.study)
        try:
            self.reporter.phase(f"Measuring 1 of {self.budget.trials}: stock defaults")
            self.look.before_server()
            baseline = self._measure(PolicyStack(), RUNG_BASELINE)
            context = self._context(baseline)
            confirmed = {}
            if is_hopeless(baseline.measurement):
                self.reporter.note("nothing else is tried: no setting mends this")
            else:
                self._search(context)
                confirmed = self._confirmed(baseline)
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

    @property
    def gates(self) -> Gates:
        """What a trial has to pass, by what is known of the baseline now."""
        return Gates(self._stock(), self.quality)

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

    def _search(self, context: Context) -> None:
        lossless = build_space(context, harm=Harm.LOSSLESS)
        widest = build_space(context, harm=self.rules.max_harm)
        search = Search(self.study.name, self.store.url, seed=self.rules.seed)
        search.recover()
        search.suggest_first(lossless, lossless.defaults)
        if context.verdict is not None:
            for values in first_guesses(lossless, context.verdict.bottleneck):
                search.suggest_first(lossless, values)
        if quality := self._judging():
            judge_earlier(self._points(), quality, self.budget, self._left_s, self.reporter)
        exhausted = False
        while self._affords_another():
            unlocked = self._unlocked(lossless, widest, exhausted=exhausted)
            space = widest if unlocked else lossless
            if not space.knobs:
                why = "; ".join(f"{name}: {reason}" for name, reason in space.refusals.items())
                self.reporter.note(f"nothing can be searched here: {why}")
                return
            proposal, stack = self._propose(search, space, context)
            if proposal is not None:
                self._try(search, proposal, stack)
            elif unlocked or not self._unlocked(lossless, widest, exhausted=True):
                self.reporter.note("every configuration of this space was measured or cannot run")
                return
            else:
                exhausted = True

    def _propose(
        self, search: Search, space: SearchSpace, context: Context
    ) -> tuple[Proposal | None, PolicyStack]:
        """A point that was not measured yet; what cannot fit is told to the sampler unmeasured."""
        for _ in range(SAMPLER_TRIES):
            proposal = search.ask(space)
            stack = stack_from(space, proposal.values, context)
            if (known := self._known(stack)) is not None:
                self._tell(search, proposal, known)
            elif reason := infeasible_reason(stack, context):
                self._note_once(reason, f"not launched, {describe(stack)} and others alike: ")
                search.tell_failed(proposal)
            else:
                return proposal, stack

        def is_new(values: Mapping[str, JsonValue]) -> bool:
            stack = stack_from(space, values, context)
            return self._known(stack) is None and infeasible_reason(stack, context) is None

        drawn = search.ask_new(space, is_new)
        return drawn, PolicyStack() if drawn is None else stack_from(space, drawn.values, context)

    def _note_once(self, reason: str, about: str = "") -> None:
        if reason not in self.noted:
            self.noted.add(reason)
            self.reporter.note(f"{about}{reason}")

    def _try(self, search: Search, proposal: Proposal, stack: PolicyStack) -> None:
        rung = RUNG_LOSSLESS if stack.harm is Harm.LOSSLESS else RUNG_NEAR_LOSSLESS
        number = len(self._points()) + 1
        self.reporter.phase(f"Measuring {number} of {self.budget.trials}: {describe(stack)}")
        self.foresight.tell(stack)
        try:
            entry = self._measure(stack, rung, proposal.optuna_number)
            if not entry.reused:
                self.foresight.measured(entry.trial, entry.measurement)
            if quality := self._judging():
                quality.judge(entry)
        except KeyboardInterrupt:
            search.tell_stopped(proposal)
            raise
        if reason := self.gates.objection(entry):
            self.reporter.note(f"trial {entry.trial.number} is out: {reason}")
        self._tell(search, proposal, entry)

    def _confirmed(self, baseline: Entry) -> dict[int, Measurement]:
        found = self._finals()
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
            self.reporter,
            rounds=self.budget.confirm_rounds,
            seed=self.rules.seed,
            clock=self.clock,
            round_s=trial_s(self._points()) * len(trials),
            until_s=self.until_s,
            afterwards=self.quality.at_server if self.quality and may_harm else None,
        )
        if quality := self._judging():
            entries = [entry for entry in found.chosen if entry.trial.number in confirmed]
            judge_finalists(entries, quality, self._left_s, self.reporter)
        return confirmed

    def _decide(self, confirmed: dict[int, Measurement]) -> Decision:
        points = self._points()
        out = rejected(points, self.gates, confirmed)
        final = [
            Candidate(number, entry.trial.stack, confirmed.get(number, entry.measurement))
            for entry in points
            if (number := entry.trial.number) == 0 or number not in out
        ]
        stock = final.pop(0) if final and final[0].number == 0 else None
        decision = decide(self.study.goal, stock, final, out)
        chosen = [entry for entry in points if entry.trial.number == decision.recommended]
        flight = self.bench.plan.concurrency
        more = [
            *(said for entry in chosen if (said := self.gates.vouched(entry))),
            *doubts(self.workload, flight, is_confirmed=bool(confirmed)),
        ]
        return decision.model_copy(update={"reasons": (*decision.reasons, *more)})

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
        quality = self._judging() if rung == RUNG_NEAR_LOSSLESS else None
        return None if quality is None else quality.at_server

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

    def _finals(self) -> Finals:
        """Who would be confirmed now."""
        return finals(
            self.study.goal, self._points(), self.gates, self.budget, self.quality, self._left_s()
        )

    def _judging(self) -> TrialQuality | None:
        """Who judges answers, if there is a baseline whose answers they can be compared with."""
        stock = self._stock()
        return None if stock is None or stock.failure is not None else self.quality

    def _stock(self) -> Measurement | None:
        """The baseline's measurement, once there is one."""
        return next((e.measurement for e in self._points() if e.trial.number == 0), None)

    def _known(self, stack: PolicyStack) -> Entry | None:
        for entry in self._points():
            if entry.trial.stack.arguments == stack.arguments:
                return entry
        return None

    def _tell(self, search: Search, proposal: Proposal, entry: Entry) -> None:
        values = objective_values(self.study.goal, entry.measurement)
        if not values or self.gates.objection(entry):
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
        points = self._points()
        tried_enough = exhausted or len(points) >= LOSSLESS_SHARE * self.budget.trials
        needed = tried_enough and not is_met_without_harm(self.study.goal, points)
        may_harm = len(widest.knobs) > len(lossless.knobs)
        wanted = self.rules.explore_lossy or not lossless.knobs or (may_harm and needed)
        if not (wanted and may_harm and self.quality):
            return wanted
        if not (refused := self.quality.refusal()) and self._has_time(may_harm=True):
            return True
        why = refused or "no time is left to ask them the questions of quality"
        self._note_once(f"settings that may change answers are not tried any more: {why}")
        return False

    def _affords_another(self) -> bool:
        points = self._points()
        if len(points) >= self.budget.trials:
            return False
        if self._has_time(may_harm=False):
            return True
        self.reporter.note(
            f"the time budget is spent after {len(points)} trials: "
            f"what is left goes to the confirmation"
        )
        return False

    def _has_time(self, *, may_harm: bool) -> bool:
        """Whether one more trial can be measured, confirmed, and asked if it `may_harm`."""
        if self.until_s == math.inf:
            return True
        chosen = self._finals().chosen
        needed = needed_s(self._points(), chosen, self.budget, self.quality, may_harm=may_harm)
        return needed <= self._left_s()

    def _left_s(self) -> float:
        return self.until_s - self.clock()


def _request_set(requests: tuple[Request, ...]) -> RequestSet:
    return RequestSet(requests, fingerprint(requests).digest)
