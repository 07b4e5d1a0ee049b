"""One trial of a search: measure what was proposed, new or once more, and tell what it gave."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.autotune.decide import mean_metrics, objective_values
from kvtune.autotune.explore.attributes import attributes_of
from kvtune.autotune.forecast.foresight import Foresight
from kvtune.autotune.ledger import RUNG_OF, RUNG_REPEAT, Entry, RequestSet
from kvtune.autotune.limits import Rules
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.search import Proposal, Search
from kvtune.autotune.so_far import SoFar
from kvtune.policies.stack import describe
from kvtune.profilers.goal import goal_violations
from kvtune.types import Harm, PolicyStack, Status

REPEAT_SEED = 1000
"""What the first repeat of a point adds to the seed; the rounds of a confirmation add less."""


@dataclass(frozen=True, slots=True)
class Following:
    """What is measured next, and why, if a model chose it. `again`: it is measured once more."""

    proposal: Proposal
    stack: PolicyStack
    because: str = ""
    again: Entry | None = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures trials by replaying `requests`, and tells the sampler's tables of `search`."""

    so_far: SoFar
    rules: Rules
    requests: RequestSet
    search: Search
    foresight: Foresight
    reporter: Reporter

    def measure(self, following: Following) -> None:
        """Measure it. An interrupt passes through, and it then comes up again first."""
        proposal, stack = following.proposal, following.stack
        number = len(self.so_far.tried) + 1
        of, once_more = self.so_far.budget.trials, " once more" if following.again else ""
        self.reporter.phase(f"Measuring {number} of {of}{once_more}: {describe(stack)}")
        if following.because:
            self.search.describe(proposal, {"because": following.because})
            self._say_why(following)
        try:
            if following.again is None:
                entry = self._measured(following)
            else:
                entry = following.again
                self._repeat(entry, proposal)
        except KeyboardInterrupt:
            self.search.tell_stopped(proposal)
            raise
        self.tell(proposal, entry)

    def _say_why(self, following: Following) -> None:
        first = None if following.again is None else following.again.trial.number
        number = self.so_far.ledger.number_of(
            following.stack,
            repeats=self.so_far.budget.repeats if first is None else 1,
            seed=self._seed(first),
            parent=first,
        )
        who = f"trial {number}" if first is None else f"trial {number}, trial {first} once more"
        self.reporter.step("note", f"{who}: {following.because}", trial=number)

    def _seed(self, parent: int | None) -> int:
        """The seed of a new point, or of the next repeat of one."""
        repeats = 0 if parent is None else REPEAT_SEED + len(self.so_far.repeats(parent))
        return self.rules.seed + repeats

    def _measured(self, following: Following) -> Entry:
        """Measure a new point, and say what is to be said of it."""
        self.foresight.tell(following.stack)
        entry = self._measure(following.stack, following.proposal)
        number = entry.trial.number
        if not entry.reused:
            self.foresight.measured(entry.trial, entry.measurement)
        if quality := self.so_far.judging:
            quality.judge(entry)
        if reason := self.so_far.gates.objection(entry):
            self.reporter.step("note", f"trial {number} is out: {reason}", trial=number)
        if number in (twins := self.so_far.twins):
            self.reporter.note(
                f"the engine runs trial {number} exactly as trial {twins[number]}: it counts as "
                "a repeat of that one"
            )
        return entry

    def _measure(self, stack: PolicyStack, proposal: Proposal) -> Entry:
        """Measure a trial; the server of one that may change answers is asked about quality."""
        may_harm = stack.harm is not Harm.LOSSLESS
        quality = self.so_far.judging if may_harm else None
        entry = self.so_far.ledger.run(
            stack,
            self.requests,
            repeats=self.so_far.budget.repeats,
            seed=self.rules.seed,
            rung=RUNG_OF[stack.harm],
            canary=may_harm,
            optuna_number=proposal.optuna_number,
            afterwards=None if quality is None else quality.at_server,
        )
        self.reporter.trial(entry.trial, entry.measurement, reused=entry.reused)
        return entry

    def _repeat(self, first: Entry, proposal: Proposal) -> None:
        """Measure the point of a trial once more, with fresh prompts."""
        number = first.trial.number
        entry = self.so_far.ledger.run(
            first.trial.stack,
            self.requests,
            repeats=1,
            seed=self._seed(number),
            rung=RUNG_REPEAT,
            canary=False,
            parent=number,
            optuna_number=proposal.optuna_number,
        )
        self.reporter.trial(entry.trial, entry.measurement, reused=entry.reused)

    def tell(self, proposal: Proposal, entry: Entry) -> None:
        """Tell the sampler what a trial gave, together with all that run as it does."""
        goal = self.so_far.goal
        self.search.describe(proposal, attributes_of(entry))
        number = self.so_far.twins.get(entry.trial.number, entry.trial.number)
        (found,) = [e.measurement for e in self.so_far.distinct if e.trial.number == number]
        if found.status is Status.CUT and (seen := found.metrics.get(goal.objective_metric)):
            self.search.tell_cut(proposal, seen[0], found.share)
            return
        values = objective_values(goal, found)
        objectives = self.so_far.objectives
        costs = objectives.costs(entry)
        is_placed = len(costs) == len(objectives.also)
        if not values or not is_placed or self.so_far.gates.objection(entry):
            self.search.tell_failed(proposal)
            return
        violations = goal_violations(goal, mean_metrics(found)).values()
        self.search.tell(
            proposal,
            sum(values) / len(values),
            [1.0 if violation is None else violation for violation in violations],
            [costs[name].estimate for name in objectives.also],
        )
