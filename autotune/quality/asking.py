"""What the trials of a study are asked, how often, and what is kept of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from kvtune.autotune.limits import QualityRules
from kvtune.autotune.quality.answers import (
    AGAIN_CONCURRENCY,
    CONCURRENCY,
    AnswerBook,
    Pass,
    Questions,
    prompt_texts,
)
from kvtune.autotune.quality.sizing import MOST_PROMPTS, noise_of, proving
from kvtune.autotune.quality.subjects import ServedSubject
from kvtune.autotune.trial import Bench
from kvtune.engines.base import ServerSpec
from kvtune.profilers.quality.compare import Asked
from kvtune.profilers.quality.suite import Size, Suite, SuitePlan
from kvtune.store.database import Store
from kvtune.store.rows import StudyRow
from kvtune.types import EffectiveConfig, Workload

STOCK = 0
"""The number of the trial with the stock defaults."""


@dataclass(slots=True)
class Asking:
    """The questions of one study. `effective` is what the stock server said of itself, if it did.

    `reuse=False` takes no answers from before.
    """

    suites: tuple[Suite, ...]
    rules: QualityRules
    study: StudyRow
    store: Store
    bench: Bench
    workload: Workload
    seed: int
    reuse: bool
    effective: EffectiveConfig | None = None
    _questions: dict[Size, Questions] = field(init=False, default_factory=dict)
    _noise: Mapping[str, float] | None = field(init=False, default=None)
    _told: set[str] = field(init=False, default_factory=set)

    def questions(self, size: Size) -> Questions:
        """What is asked: everything in a screen, and of finalists what can prove the limits."""
        if size not in self._questions:
            plan, limits = self.plan(size), self.rules.limits
            if size is Size.SCREEN:
                self._questions[size] = Questions(self.suites, plan, limits)
            else:
                self._questions[size] = proving(self.suites, plan, limits, self._known_noise())
                self._tell_doubts(size)
        return self._questions[size]

    def learn(self, screens: Sequence[Asked]) -> None:
        """See from both screens of the stock defaults how much finalists have to be asked."""
        self._noise = noise_of(self.suites, *screens)
        for size in [one for one in self._questions if one is not Size.SCREEN]:
            del self._questions[size]

    def plan(self, size: Size) -> SuitePlan:
        """The plan of all items of a size, for the context that the stock defaults have."""
        prompts = prompt_texts(self.workload.requests)[:MOST_PROMPTS]
        return SuitePlan(
            size, self.seed, self._context_tokens(), workload=prompts, data=self.rules.data
        )

    def passes(self, number: int, size: Size) -> list[Pass]:
        """How often a trial is asked, and how.

        The stock defaults are asked a screen twice at one server, because no other one is started
        so early, and what finalists are asked at two.
        """
        if number != STOCK:
            return [Pass("the candidate", self.seed, CONCURRENCY)]
        again = Pass(
            "the stock defaults again", self.seed + 1, AGAIN_CONCURRENCY, size is not Size.SCREEN
        )
        return [Pass("the stock defaults", self.seed, CONCURRENCY), again]

    def at_once(self, size: Size) -> int:
        """How often one server is asked at most."""
        return 2 if size is Size.SCREEN else 1

    @property
    def book(self) -> AnswerBook:
        """The answers that are kept."""
        return AnswerBook(self.store, self.bench.reporter, reuse=self.reuse)

    def served(self, number: int, arguments: Mapping[str, JsonValue]) -> ServedSubject:
        """A server of its own for a trial."""
        bench = self.bench
        spec = ServerSpec(
            model=bench.model,
            served_model_name=bench.served_model_name,
            arguments=arguments,
            environment=bench.environment,
        )
        return ServedSubject(
            bench.engine,
            spec,
            log_path=bench.log_dir / f"quality-{number}.log",
            start_timeout_s=bench.start_timeout_s,
            request_timeout_s=bench.plan.request_timeout_s,
        )

    def _tell_doubts(self, size: Size) -> None:
        for doubt in self._questions[size].doubts if size is self.rules.size else ():
            if doubt not in self._told:
                self._told.add(doubt)
                self.bench.reporter.note(doubt)

    def _known_noise(self) -> Mapping[str, float]:
        """What `learn` said, or would say of the answers that are kept."""
        if self._noise is None:
            subject = self.served(STOCK, self.study.base_arguments)
            passes = self.passes(STOCK, Size.SCREEN)
            screens = self.book.kept(self.questions(Size.SCREEN), subject, passes)
            self._noise = None if screens is None else noise_of(self.suites, *screens)
        return self._noise or {}

    def _context_tokens(self) -> int | None:
        """What the stock server said, or else what its arguments and the checkpoint say."""
        if self.effective is None:
            rows = [row for row in self.store.trials(self.study) if row.number == STOCK]
            found = rows[0].measurement if rows else None
            self.effective = None if found is None else found.effective
        said = None if self.effective is None else self.effective.max_model_len_tokens
        return said or self.served(STOCK, self.study.base_arguments).max_tokens
