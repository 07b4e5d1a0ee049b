"""The sampler: Optuna behind ask and tell. The only file that knows Optuna.

A trial that failed is told as pruned with a violated constraint and no value: the sampler then
keeps away from it without any made-up score (told as plain failures, Optuna's TPE forgets them).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import optuna
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import Trial, TrialState
from pydantic import JsonValue
from sqlalchemy.exc import SQLAlchemyError

from kvtune.autotune.limits import Also
from kvtune.autotune.space import SearchSpace, SpaceKnob
from kvtune.errors import StoreError

RUNS = "runs"
STARTUP_TRIALS = 6
NEW_TRIES = 300


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point that the sampler wants measured: knob name to value."""

    optuna_number: int
    values: dict[str, JsonValue]


@contextmanager
def _kept() -> Iterator[None]:
    """Turn what goes wrong in the sampler's tables into an error that says what to do."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise StoreError(
            f"the sampler's state cannot be written: {str(cause).splitlines()[0]}",
            "free space or unlock the database and run the same command again: "
            "no finished trial is lost",
        ) from error
    except optuna.exceptions.UpdateFinishedTrialError as error:
        raise StoreError(
            "another search works on the same study",
            "let it end, or give this one another --study name",
        ) from error


class Search:
    """One Optuna study: it maximises one objective under constraints and minimises others, `also`.

    `storage_url` is an SQLAlchemy URL; the study lives in Optuna's own tables there and goes on
    where it stopped when it exists already. With other objectives it is another study of Optuna's.
    """

    @_kept()
    def __init__(
        self, name: str, storage_url: str, *, seed: int, also: Sequence[Also] = ()
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = RDBStorage(storage_url)
        self._study = optuna.create_study(
            study_name="-".join([name, *(["front", *also] if also else [])]),
            storage=self._storage,
            directions=["maximize", *["minimize"] * len(also)],
            load_if_exists=True,
        )
        self._is_front = bool(also)
        told = len(self._study.get_trials(deepcopy=False))
        self._rng = random.Random(seed + told)
        # What goes on must not draw again what it drew before.
        self._study.sampler = TPESampler(
            multivariate=True, n_startup_trials=STARTUP_TRIALS, seed=seed + told
        )
        self._named = dict(self._study.user_attrs)
        self._open: dict[int, Trial] = {}
        self._first: deque[dict[str, JsonValue]] = deque()

    @property
    def name(self) -> str:
        """The study's name in Optuna's tables."""
        return str(self._study.study_name)

    @_kept()
    def recover(self) -> None:
        """Close trials that a process which is gone left running; they come up again first."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number not in self._open:
                self._study.tell(trial.number, state=TrialState.FAIL)
                self._study.enqueue_trial(dict(trial.params))

    @_kept()
    def suggest_first(self, space: SearchSpace, values: Mapping[str, JsonValue]) -> bool:
        """Propose this point of `space` before any that the sampler would choose, but only once.

        Points that come up again, because they were interrupted, come before it. Returns whether
        it was not proposed before.
        """
        point = _encoded(space, values)
        known = [
            trial.system_attrs.get("fixed_params", trial.params)
            for trial in self._study.get_trials(deepcopy=False)
        ]
        is_new = point not in [*known, *self._first]
        if is_new:
            self._first.append(point)
        return is_new

    @property
    @_kept()
    def has_queued(self) -> bool:
        """Whether a point waits to be proposed before any that the sampler would choose."""
        waiting = (TrialState.WAITING,)
        return bool(self._first or self._study.get_trials(deepcopy=False, states=waiting))

    @_kept()
    def ask_at(self, space: SearchSpace, values: Mapping[str, JsonValue]) -> Proposal:
        """Propose this point of `space`, as often as it is asked for, when nothing is queued."""
        self._study.enqueue_trial(_encoded(space, values))
        return self.ask(space)

    @_kept()
    def ask(self, space: SearchSpace) -> Proposal:
        """Propose a point of `space`. Every proposal must be told how it went.

        A point that waited may come from a space with fewer knobs: others stay at their defaults.
        """
        if self._first:
            # Not sooner: Optuna takes its queue in order, and what is to come up again is there.
            self._study.enqueue_trial(self._first.popleft())
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        trial = self._study.ask()
        named = next(
            (w.system_attrs["fixed_params"] for w in waiting if w.number == trial.number), None
        )
        self._name_places(space)
        values: dict[str, JsonValue] = {}
        for knob in space.knobs:
            if not knob.is_active(values):
                continue
            is_named = named is None or knob.key in named
            values[knob.knob.name] = _suggest(trial, knob) if is_named else knob.knob.default
        self._open[trial.number] = trial
        return Proposal(trial.number, values)

    def _name_places(self, space: SearchSpace) -> None:
        """Say once in Optuna's tables which value each place of a knob's list stands for."""
        for name, places in _places(space).items():
            if self._named.get(name) != places:
                self._named[name] = places
                self._study.set_user_attr(name, places)

    @_kept()
    def ask_new(
        self, space: SearchSpace, is_new: Callable[[Mapping[str, JsonValue]], bool]
    ) -> Proposal | None:
        """Propose a uniformly drawn point that is new; None when none is found."""
        for _ in range(NEW_TRIES):
            values: dict[str, JsonValue] = {}
            for knob in space.knobs:
                if knob.is_active(values):
                    values[knob.knob.name] = _draw(self._rng, knob)
            if is_new(values):
                return self.ask_at(space, values)
        return None

    @_kept()
    def describe(self, proposal: Proposal, attributes: Mapping[str, JsonValue]) -> None:
        """Say in Optuna's tables what an open proposal is, for people: the sampler never looks."""
        trial = self._open[proposal.optuna_number]
        for name, value in attributes.items():
            trial.set_user_attr(name, value)

    @_kept()
    def tell(
        self,
        proposal: Proposal,
        value: float,
        violations: Sequence[float],
        costs: Sequence[float] = (),
    ) -> None:
        """The proposal was measured; a violation above 0 means that a limit was missed by that.

        `costs` are what it has of each further objective.
        """
        trial = self._open.pop(proposal.optuna_number)
        trial.set_constraint(RUNS, 0.0)
        for index, violation in enumerate(violations):
            trial.set_constraint(f"limit {index}", violation)
        self._study.tell(trial, [value, *costs])

    @_kept()
    def tell_failed(self, proposal: Proposal) -> None:
        """The proposal could not be measured: its region is to be avoided."""
        trial = self._open.pop(proposal.optuna_number)
        trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    @_kept()
    def tell_cut(self, proposal: Proposal, value: float, share: float) -> None:
        """The proposal runs and is hopeless: given up at `value` after `share` of its load."""
        trial = self._open.pop(proposal.optuna_number)
        trial.set_constraint(RUNS, 0.0)
        if not self._is_front:  # Optuna takes no value on the way to several.
            trial.report(value, step=round(100 * share))
        self._study.tell(trial, state=TrialState.PRUNED)

    @_kept()
    def tell_stopped(self, proposal: Proposal) -> None:
        """The proposal was interrupted: nothing is known about it, and it comes up again first."""
        trial = self._open.pop(proposal.optuna_number)
        self._study.tell(trial, state=TrialState.FAIL)
        self._study.enqueue_trial(dict(trial.params))


def _places(space: SearchSpace) -> dict[str, str]:
    """By knob, the value that each number in the sampler's tables stands for: "0: 16, 1: 32"."""
    return {
        entry.knob.name: ", ".join(f"{at}: {value}" for at, value in enumerate(entry.knob.choices))
        + f" {entry.knob.unit}".rstrip()
        for entry in space.knobs
        if _ordered(entry)
    }


def _suggest(trial: Trial, knob: SpaceKnob) -> JsonValue:
    spec = knob.knob
    if _ordered(knob):
        return spec.choices[int(trial.suggest_int(knob.key, 0, len(spec.choices) - 1))]
    if spec.choices:
        return cast(JsonValue, trial.suggest_categorical(knob.key, list(spec.choices)))
    low, high = _bounds(knob)
    if spec.kind == "int":
        return int(trial.suggest_int(knob.key, int(low), int(high)))
    return float(trial.suggest_float(knob.key, low, high))


def _ordered(knob: SpaceKnob) -> bool:
    """Numbers are sampled by their place in the list, so that neighbours stay neighbours."""
    return all(type(choice) in (int, float) for choice in knob.knob.choices) and bool(
        knob.knob.choices
    )


def _encoded(space: SearchSpace, values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    encoded = dict(values)
    for knob in space.knobs:
        if (name := knob.knob.name) in values:
            value = encoded.pop(name)
            encoded[knob.key] = knob.knob.choices.index(value) if _ordered(knob) else value
    return encoded


def _draw(rng: random.Random, knob: SpaceKnob) -> JsonValue:
    spec = knob.knob
    if spec.choices:
        return rng.choice(spec.choices)
    low, high = _bounds(knob)
    return rng.randint(int(low), int(high)) if spec.kind == "int" else rng.uniform(low, high)


def _bounds(knob: SpaceKnob) -> tuple[float, float]:
    if knob.knob.low is None or knob.knob.high is None:
        raise ValueError(f"knob {knob.knob.name} has neither choices nor bounds")
    return knob.knob.low, knob.knob.high
