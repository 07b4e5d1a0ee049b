"""Measure what tuners chose beside stock: in turns, on servers of their own and new requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peer_case import HELDOUT_SEED, Arguments, Setting, settings_text
from peer_log import Log, say
from pydantic import JsonValue

from kvtune.autotune.trial import run_trial
from kvtune.engines.base import Engine


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and by whom; `by` is empty for stock alone."""

    arguments: dict[str, JsonValue]
    by: tuple[str, ...]

    @property
    def key(self) -> str:
        """What tells it from other choices."""
        return key_of(self.arguments)


def key_of(arguments: Arguments) -> str:
    """The same for the same arguments in whatever order."""
    return json.dumps(dict(arguments), sort_keys=True)


def choices(chosen: Sequence[tuple[str, Arguments]]) -> list[Choice]:
    """Stock first, then every different choice once, with all who made it."""
    by: dict[str, list[str]] = {key_of({}): []}
    for who, arguments in chosen:
        by.setdefault(key_of(arguments), []).append(who)
    return [Choice(json.loads(key), tuple(names)) for key, names in by.items()]


def turns(number: int, turn: int) -> list[int]:
    """The order of a round: another one begins each time, and every other round runs backwards."""
    order = [(turn + place) % number for place in range(number)]
    return order if turn % 2 == 0 else order[::-1]


def measure_choices(
    setting: Setting,
    engine: Engine,
    found: Sequence[Choice],
    log: Log,
    *,
    rounds: int,
    logs: Path,
) -> None:
    """Add a part "replay" to the log for each choice and round that it has none for."""
    logs.mkdir(parents=True, exist_ok=True)
    for turn in range(rounds):
        requests = setting.case.requests(HELDOUT_SEED + turn)
        bench = setting.bench(engine, requests, logs)
        for place in turns(len(found), turn):
            choice = found[place]
            if log.find(part="replay", turn=turn, key=choice.key):
                continue
            trial = setting.trial(place, choice.arguments, HELDOUT_SEED + turn)
            measured, _ = run_trial(trial, bench, requests, canary=False, label="final")
            figures = {name: values[0] for name, values in measured.metrics.items()}
            failure = measured.failure and measured.failure.message
            log.add(
                {
                    "part": "replay",
                    "turn": turn,
                    "key": choice.key,
                    "figures": figures,
                    "failure": failure,
                }
            )
            metric = setting.case.limits.objective_metric
            told = failure or f"{figures[metric]:.3g} {metric}"
            say(f"round {turn + 1} of {rounds}, {settings_text(choice.arguments)}: {told}")


def values_of(log: Log, key: str, metric: str) -> list[float]:
    """The figures of a choice, a value a round; 0 where it failed."""
    parts = sorted(log.all(part="replay", key=key), key=lambda part: int(part["turn"]))
    return [float(part["figures"].get(metric, 0.0)) for part in parts]
