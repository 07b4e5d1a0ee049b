"""The trials of a search between its baseline and its confirmation: propose, measure, tell.

It climbs a ladder: lossless levers come first, and those of the next rung when all trials so far
miss the goal, or when the user asks for them. What to try next is said by a model of what was
measured so far, or by the sampler where there is no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pydantic import JsonValue

from kvtune.autotune.explore.advice import Advice
from kvtune.autotune.explore.asking import TooLate
from kvtune.autotune.explore.attributes import attributes_unmeasured
from kvtune.autotune.explore.base import Proposer
from kvtune.autotune.explore.kin import MOST, Kin, starts, told
from kvtune.autotune.explore.measuring import Following, Measuring
from kvtune.autotune.forecast.foresight import Foresight
from kvtune.autotune.guesses import first_guesses
from kvtune.autotune.judging import judge_earlier
from kvtune.autotune.ladder import Rung, Stand, ladder, next_step, unlocked, untried
from kvtune.autotune.ledger import Entry, RequestSet
from kvtune.autotune.limits import Rules
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.search import Proposal, Search
from kvtune.autotune.search_view import view_of
from kvtune.autotune.so_far import SoFar
from kvtune.autotune.space import SearchSpace, infeasible_reason, stack_from
from kvtune.autotune.standing import meeting, up_to
from kvtune.policies.base import Context
from kvtune.policies.stack import describe
from kvtune.types import Harm, PolicyStack, Regret

SAMPLER_TRIES = 10
"""How often the sampler may propose what is known before a new point is drawn blindly."""


@dataclass(slots=True)
class Exploration:
    """The trials of one search, after the baseline; `run` is the whole of it.

    `context` is what is known once the baseline was measured. Trials replay `requests`. What `kin`
    found best is tried early. Without a `proposer` the sampler says what to try. Of the `rungs`,
    those up to the one at `top` are open.
    """

    so_far: SoFar
    rules: Rules
    requests: RequestSet
    context: Context
    search: Search
    foresight: Foresight
    reporter: Reporter
    kin: Sequence[Kin] = ()
    proposer: Proposer | None = None
    rungs: tuple[Rung, ...] = field(init=False)
    top: int = field(init=False, default=0)
    advice: Advice = field(init=False)
    noted: set[str] = field(init=False, default_factory=set)
    _measuring: Measuring = field(init=False)

    def __post_init__(self) -> None:
        self.rungs = ladder(self.context, self.rules.max_harm)
        self.advice = Advice(self.proposer, self.so_far, self.context, self.kin)
        self._measuring = Measuring(
            self.so_far, self.rules, self.requests, self.search, self.foresight, self.reporter
        )

    def run(self) -> None:
        """Measure trials until the budget, or what could be tried, is used up."""
        self._begin()
        self._explore()

    def reopen(self) -> None:
        """Go on where a confirmation that nothing passed opens a rung, if there is budget."""
        is_needed = self._above is not None and self._stand(self.rungs[self.top]).missed
        if is_needed and self._affords_another() and self._climb():
            self._explore()

    def _explore(self) -> None:
        self._search()
        self.so_far.favourite = self._favourite()
        self.reporter.standing(view_of(self.so_far, self.rungs, self.top, is_over=True))

    def _search(self) -> None:
        while self._affords_another():
            self._climb()
            self.reporter.standing(view_of(self.so_far, self.rungs, self.top))
            space = self._tried_now().space
            if not space.knobs:
                why = "; ".join(f"{name}: {reason}" for name, reason in space.refusals.items())
                self._stop(f"nothing can be searched here: {why}")
                return
            why = "" if self.search.has_queued else self.advice.stop(space)
            if (bare := self._without_price()) and (why or self._left <= len(bare)):
                self.noted.add(f"price of {bare[0].name}")
                if (priced := self._advised(bare[0].space, bare[0].harm)) is not None:
                    self._measuring.measure(priced)
                continue
            if why:
                self._stop(why)
                return
            if (following := self._propose(space)) is not None:
                self._measuring.measure(following)
            elif not self._climb(is_exhausted=True):
                self._stop("every configuration of this space was measured or cannot run")
                return

    def untried(self) -> str:
        """Which settings were not tried although the confirmation shows a need; empty if none."""
        tried = {entry.trial.stack.harm for entry in self.so_far.points}
        for below, rung in pairwise(self.rungs):
            if self._stand(below).missed and untried([rung], tried):
                return (
                    f"{rung.harm} settings were not tried: {below.harm} trials met the goal in the "
                    "search, and missed it when they were confirmed; with a larger budget the same "
                    "command goes on there"
                )
        return ""

    def regret(self, arguments: Mapping[str, JsonValue]) -> Regret | None:
        """How far a measured point may be from the best of what was searched; None if unknown."""
        return self.advice.regret(arguments, self._tried_space)

    # --- the parts, in order ---

    def _begin(self) -> None:
        """Queue what is tried first, and judge what an earlier search left unjudged."""
        for rung in self.rungs:
            self.reporter.step("rung", rung.says)
        first = self.rungs[-1 if self.rules.explore_lossy else 0].space
        self.search.recover()
        self.search.suggest_first(first, first.defaults)
        self._start_from_kin(first)
        if not self.advice.is_given and self.context.verdict is not None:
            for values in first_guesses(first, self.context.verdict.bottleneck):
                self.search.suggest_first(first, values)
        if quality := self.so_far.judging:
            so_far = self.so_far
            judge_earlier(so_far.points, quality, so_far.budget, so_far.left_s, self.reporter)

    def _start_from_kin(self, space: SearchSpace) -> None:
        """Queue the best points of earlier studies, in at most half of the trials that are left."""
        most = min(MOST, max(self._left // 2, 1))
        early = starts(self.kin, space, self.context)
        new = [one for one in early if self._known(one.stack) is None][:most]
        if queued := [one for one in new if self.search.suggest_first(space, one.values)]:
            self.reporter.note(told(queued))

    def _affords_another(self) -> bool:
        tried = len(self.so_far.tried)
        if tried >= self.so_far.budget.trials:
            self._stop(f"all {tried} trials of the budget are used")
            return False
        if self.so_far.has_time(may_harm=False):
            return True
        self._stop(self.so_far.time_is_spent())
        return False

    def _climb(self, *, is_exhausted: bool = False) -> bool:
        """Open all rungs that may be tried now, and say why; whether there was one."""
        before = self.top
        while (above := self._above) and (why := self._reason(above, is_exhausted=is_exhausted)):
            if not self._may_harm():
                break
            rung = self.rungs[self.top]
            self.reporter.step("unlock", unlocked(rung, above, self._stand(rung), why))
            self.top = self.rungs.index(above)
            is_exhausted = False
            self._start_from_kin(above.space)
        return self.top > before

    @property
    def _above(self) -> Rung | None:
        """The next rung on which there is something to try."""
        return next((rung for rung in self.rungs[self.top + 1 :] if rung.opens), None)

    def _reason(self, above: Rung, *, is_exhausted: bool) -> str:
        rung = self.rungs[self.top]
        return next_step(
            rung,
            above,
            replace(self._stand(rung), is_exhausted=is_exhausted),
            lambda: self.advice.chance(rung.space),
            is_asked_for=self.rules.explore_lossy,
        )

    def _tried_now(self) -> Rung:
        """The rung that is searched: an open one, and the lowest that meets the goal by itself."""
        if self.top == 0 or not self._may_harm():
            return self.rungs[0]
        if not self.rules.explore_lossy:
            for rung in self.rungs[: self.top]:
                if rung.space.knobs and self._stand(rung).met:
                    return rung
        return self.rungs[self.top]

    def _without_price(self) -> list[Rung]:
        """Where prices are asked for, the lower rungs without a trial: each gets one at the end.

        Else harm would be compared with stock, and not with the best that does none.
        """
        tried = {entry.trial.stack.harm for entry in self.so_far.points if entry.trial.number}
        is_time = self.rules.explore_lossy and not self.search.has_queued
        bare = untried(self.rungs[: self.top], tried) if is_time else []
        return [rung for rung in bare if f"price of {rung.name}" not in self.noted]

    @property
    def _left(self) -> int:
        return self.so_far.budget.trials - len(self.so_far.tried)

    def _may_harm(self) -> bool:
        """Whether another trial can be asked what its answers are worth, if any is asked."""
        quality = self.so_far.quality
        if quality is None:
            return True
        if not (refused := quality.refusal()) and self.so_far.has_time(may_harm=True):
            return True
        why = refused or "no time is left to ask them the questions of quality"
        self._note_once(f"settings that may change answers are not tried any more: {why}")
        return False

    def _stand(self, rung: Rung) -> Stand:
        so_far, budget, tried = self.so_far, self.so_far.budget, len(self.so_far.tried)
        trials = up_to(rung.harm, so_far.distinct)
        able = up_to(rung.harm, so_far.contenders)
        missed = [e for e in trials if e.trial.number in so_far.missed]
        spent_time = 0.0 if budget.time_s is None else 1 - so_far.left_s() / budget.time_s
        return Stand(
            met=len(meeting(so_far.goal, able, so_far.gates)),
            trials=len(trials),
            tried=tried,
            spent=max(tried / budget.trials, spent_time),
            missed=sum(
                one.trial.stack.harm is rung.harm
                for one in meeting(so_far.goal, missed, so_far.gates)
            ),
        )

    def _propose(self, space: SearchSpace) -> Following | None:
        """What is to be measured next; None when nothing is left."""
        while self.search.has_queued:
            if (found := self._launchable(space, self.search.ask(space))) is not None:
                return found
        if self.advice.is_given:
            return self._advised(space)
        for _ in range(SAMPLER_TRIES):
            if (found := self._launchable(space, self.search.ask(space))) is not None:
                return found
        return self._drawn(space)

    def _launchable(self, space: SearchSpace, proposal: Proposal) -> Following | None:
        """A proposal that is new; what is known or cannot fit is told to the sampler unmeasured."""
        stack = stack_from(space, proposal.values, self.context)
        if (known := self._known(stack)) is not None:
            self._measuring.tell(proposal, known)
        elif reason := infeasible_reason(stack, self.context):
            self._note_once(reason, f"not launched, {describe(stack)} and others alike: ")
            self.search.describe(proposal, attributes_unmeasured(stack, reason))
            self.search.tell_failed(proposal)
        else:
            return Following(proposal, stack)
        return None

    def _advised(self, space: SearchSpace, harm: Harm | None = None) -> Following | None:
        """What the model chooses, or any new point if it takes too long.

        With a `harm` it is a new point that does just that: any, if the model chooses another one.
        """
        if "left out" not in self.noted and (said := self.advice.left_out(space)):
            self.noted.add("left out")
            self.reporter.note(
                "tried only in stacks where it matters; beside the stock defaults and beside the "
                f"best that is foretold: {said}"
            )
        try:
            pick = self.advice.pick(space)
        except TooLate as late:
            self._note_once(f"a point was drawn at random where the model gave none: {late}")
            return self._drawn(space, harm)
        if harm and (pick is None or pick.again or pick.stack.harm is not harm):
            return self._drawn(space, harm)
        if pick is None:
            return None
        proposal = self.search.ask_at(space, pick.values)
        return Following(proposal, pick.stack, pick.because, self._known(pick.stack))

    def _drawn(self, space: SearchSpace, harm: Harm | None = None) -> Following | None:
        """Any new point that can start; with a `harm`, that does just that."""

        def is_new(values: Mapping[str, JsonValue]) -> bool:
            stack = stack_from(space, values, self.context)
            is_wanted = harm in (None, stack.harm) and self._known(stack) is None
            return is_wanted and infeasible_reason(stack, self.context) is None

        drawn = self.search.ask_new(space, is_new)
        if drawn is None:
            return None
        return Following(drawn, stack_from(space, drawn.values, self.context))

    # --- small questions ---

    def _favourite(self) -> int | None:
        """The trial that the model takes for the best, if there is a model."""
        arguments = self.advice.recommended(self._tried_space)
        known = [e for e in self.so_far.points if e.trial.stack.arguments == arguments]
        number = known[0].trial.number if known else None
        return None if number is None else self.so_far.twins.get(number, number)

    @property
    def _tried_space(self) -> SearchSpace:
        """The space of the highest rung with a trial, whichever command measured it."""
        tried = {entry.trial.stack.harm for entry in self.so_far.points}
        searched = [rung for rung in self.rungs if rung.harm in tried] or self.rungs[:1]
        return searched[-1].space

    def _known(self, stack: PolicyStack) -> Entry | None:
        points = self.so_far.points
        return next((e for e in points if e.trial.stack.arguments == stack.arguments), None)

    def _stop(self, why: str) -> None:
        """Say why no more is tried; a search that was opened again may end as it did before."""
        if f"stop: {why}" not in self.noted:
            self.noted.add(f"stop: {why}")
            self.reporter.step("stop", why)

    def _note_once(self, reason: str, about: str = "") -> None:
        if reason not in self.noted:
            self.noted.add(reason)
            self.reporter.note(f"{about}{reason}")
