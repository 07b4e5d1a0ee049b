"""Run `kvtune search` as a user does, and read from its history what it took."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from peer_case import Setting, settings_text, write_workload
from pydantic import JsonValue

from kvtune.autotune.ledger import RUNG_CONFIRM
from kvtune.engines.vllm.arguments import to_argv
from kvtune.errors import BadInput
from kvtune.store.database import open_store
from kvtune.store.rows import TrialRow
from kvtune.types import Measurement, Status

GRACE_S = 60.0

KVTUNE = (str(Path(sys.executable).with_name("kvtune")),)

ENDED_WELL = (0, 1, 3)
"""Exit codes of a search that decided something, be it that nothing could be measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a tuner chose, on top of a case's arguments, and what that took.

    `servers_s` is the time in which servers were up or starting, where it is known.
    """

    arguments: dict[str, JsonValue]
    wall_s: float
    launches: int
    failed_launches: int
    servers_s: float | None = None
    says: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """What was chosen, in one line."""
        return settings_text(self.arguments)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the trials of a search took. Cut trials count as tried.

    `tried_s` is what `servers_s` is without the confirmation.
    """

    tried: int
    confirmed: int
    tried_s: float
    launches: int
    failed_launches: int
    servers_s: float
    cut: int


def search(
    setting: Setting,
    home: Path,
    *,
    seed: int,
    options: Sequence[str],
) -> Found:
    """One search in a home of its own, which is emptied before: it knows nothing of others.

    It tunes on as many requests as a replay has, and confirms on as many others.

    Raises:
        BadInput: it failed; the end of its output is in the message.
    """
    shutil.rmtree(home, ignore_errors=True)
    workload = home / "workload.jsonl"
    write_workload(workload, setting.case.requests(seed, times=2))
    words = [*KVTUNE, *_words(setting, workload, seed)]
    environment = {**os.environ, "KVTUNE_HOME": str(home)}
    environment.pop("KVTUNE_STORE", None)  # It would be the history of something else.
    began_s = time.monotonic()
    with (home / "search.log").open("w") as log:
        process = subprocess.Popen(
            [*words, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            told, _ = process.communicate()
        finally:
            if process.poll() is None:  # Let it stop its server.
                process.terminate()
                process.wait(GRACE_S)
    wall_s = time.monotonic() - began_s
    if process.returncode not in ENDED_WELL:
        tail = (home / "search.log").read_text()[-2000:]
        raise BadInput(f"kvtune search ended with {process.returncode}: {tail}", f"See {home}.")
    return _found(json.loads(told), home, wall_s)


def end_politely() -> None:
    """Let a polite kill of this process end what it started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def cost(rows: Iterable[TrialRow]) -> Cost:
    """What trials took, as the history has them."""
    known = [(row, row.measurement) for row in rows if row.measurement is not None]
    found = [one for _, one in known if one.status is not Status.STOPPED]
    # A server that was changed while it ran was not launched for the trial.
    launched = [one for one in found if one.effective is None or one.effective.start_kind != "live"]
    return Cost(
        tried=sum(row.rung != RUNG_CONFIRM for row, _ in known),
        confirmed=sum(row.rung == RUNG_CONFIRM for row, _ in known),
        tried_s=sum(_server_s(one) for row, one in known if row.rung != RUNG_CONFIRM),
        launches=len(launched),
        failed_launches=sum(one.failure is not None and one.start_s is None for one in launched),
        servers_s=sum(map(_server_s, found)),
        cut=sum(one.status is Status.CUT for one in found),
    )


def _server_s(found: Measurement) -> float:
    return (found.wall_s or 0.0) + (found.stop_s or 0.0)


def _words(setting: Setting, workload: Path, seed: int) -> list[str]:
    case = setting.case
    return [
        *("search", "--json"),
        *("--model", setting.model, "--engine", setting.engine),
        *("--workload", str(workload), "--heldout-share", "0.5"),
        *("--concurrency", str(case.concurrency), "--goal", case.goal),
        *("--engine-args", " ".join(to_argv(case.base_arguments))),
        *("--seed", str(seed)),
    ]


def _found(decision: dict[str, Any], home: Path, wall_s: float) -> Found:
    with open_store(home / "kvtune.db") as store:
        (summary,) = store.studies()
        rows = store.trials(summary.name)
    chosen = decision["recommended"]
    stack = next((row.trial.stack for row in rows if row.number == chosen), None)
    spent = cost(rows)
    return Found(
        arguments={} if stack is None else dict(stack.arguments),
        wall_s=wall_s,
        launches=spent.launches,
        failed_launches=spent.failed_launches,
        servers_s=spent.servers_s,
        says=f"{decision['outcome']}, {spent.tried} trials, {spent.confirmed} confirming",
        details={
            "outcome": decision["outcome"],
            "gain": decision["gain_ratio"],
            "reasons": decision["reasons"],
            "study": summary.name,
            **asdict(spent),
        },
    )
