"""What vLLM's own `auto_tune.sh` does, on kvtune's engine: a grid of two levers at falling rates.

    python benchmarks/peer_auto_tune.py capacity --model .model/SmolLM2-135M-Instruct --minutes 8

For each batch width, and in it for each chunk of tokens, a server is started. The load is sent as
fast as the case has it. Where the goal is missed, requests arrive at random at whole requests a
second, from what was reached plus one downwards, until it is met. The configuration with the most
requests a second among those that meet it is chosen.

What differs from the script, always in its favour or because it cannot be done here: the limits are
those of the case instead of one on the 99th percentile of the whole time; as fast as possible means
as many in flight as the case has; the pool is given, so the largest share of memory that starts is
not looked for; servers fork from a warm parent, and nothing waits between rates; replays are as
long as those of kvtune, and half as long at falling rates, where the script has a tenth of a
thousand; the best one is not started again for a profile; and only what was started is ended, where
the script ends every process that is called vllm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from peer_case import Arguments, Setting, cases, got_through, settings_text
from peer_log import say
from peer_search import Found
from pydantic import JsonValue

from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.errors import EngineError, KvtuneError
from kvtune.profilers.goal import goal_violations
from kvtune.profilers.load import runtime
from kvtune.profilers.load.cache import reset_prefix_cache
from kvtune.profilers.load.client import OpenLoop
from kvtune.profilers.measure import replay_workload
from kvtune.profilers.metrics.base import measure
from kvtune.profilers.synthetic import make_requests
from kvtune.types import Goal

WIDTHS = (4, 8, 16, 128)
CHUNKS = (512, 2048)
"""As many configurations as the lists in the script have, for a load with fewer in flight."""

Figures = Mapping[str, float]


class Server(Protocol):
    """A server under test."""

    def replay(self, rate: float | None) -> Figures | None:
        """The figures at so many requests a second, None: as fast as possible.

        None if the load did not get through.
        """


Start = Callable[[Arguments], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True)
class Reached:
    """The most that a configuration reached within the goal; `rate` None: all at once."""

    arguments: dict[str, JsonValue]
    rate: float | None
    requests_per_s: float


def tune(
    start: Start,
    goal: Goal,
    *,
    widths: Sequence[int],
    chunks: Sequence[int],
    left_s: Callable[[], float],
    found: Found,
) -> tuple[Reached | None, Found]:
    """Go through the grid while time is left; the best, and `found` with what was launched."""
    best: Reached | None = None
    for width, chunk in ((width, chunk) for width in widths for chunk in chunks):
        if left_s() <= 0:
            break
        arguments: dict[str, JsonValue] = {"max-num-seqs": width, "max-num-batched-tokens": chunk}
        found = replace(found, launches=found.launches + 1)
        try:
            with start(arguments) as server:
                reached = _highest(server, goal, left_s)
        except EngineError as error:
            found = replace(found, failed_launches=found.failed_launches + 1)
            say(f"{settings_text(arguments)}: {error.message}")
            continue
        if reached is None:
            say(f"{settings_text(arguments)}: the goal was not met, or not in time")
            continue
        rate, throughput = reached
        at = "all at once" if rate is None else f"{rate:g} requests/s"
        say(f"{settings_text(arguments)}: {throughput:.2f} requests/s within the goal, {at}")
        if best is None or throughput > best.requests_per_s:
            best = Reached(arguments, rate, throughput)
    return best, found


def _highest(
    server: Server, goal: Goal, left_s: Callable[[], float]
) -> tuple[float | None, float] | None:
    """The rate and the throughput at which the goal is met first, coming down; None: at none."""
    figures = server.replay(None)
    if figures is None:
        return None
    if meets(goal, figures):
        return None, figures["requests_per_s"]
    for rate in range(int(figures["requests_per_s"]) + 1, 0, -1):
        if left_s() <= 0:
            return None
        figures = server.replay(float(rate))
        if figures is None:
            return None
        if meets(goal, figures):
            return float(rate), figures["requests_per_s"]
    return None


def meets(goal: Goal, figures: Figures) -> bool:
    """Whether all limits hold; what was not measured does not."""
    violations = goal_violations(goal, figures).values()
    return all(violation is not None and violation <= 0 for violation in violations)


@dataclass(slots=True)
class _Loaded:
    """A real server under the load of a case; every replay has prompts of its own."""

    setting: Setting
    server: RunningServer
    seed: int
    replays: int = 0

    def replay(self, rate: float | None) -> Figures | None:
        """Replay the load once, after the prefix cache was emptied."""
        if self.replays:
            runtime.run(reset_prefix_cache(self.server.endpoint))
        self.replays += 1
        case = self.setting.case
        load = case.load
        if rate is not None:
            load = replace(load, arrival=f"poisson:{rate:g}", requests=-(-load.requests // 2))
        requests = tuple(make_requests(load, self.seed))
        plan = self.setting.plan(requests)
        run = runtime.run(
            replay_workload(
                self.server.endpoint,
                requests,
                plan if rate is None else replace(plan, arrivals=OpenLoop()),
                salt=1000 * self.seed + self.replays,
                max_model_len_tokens=self.server.effective.max_model_len_tokens,
                should_stop=self.server.failure,
            )
        )
        return measure(run, case.limits) if got_through(run) else None


def auto_tune(
    setting: Setting,
    engine: Engine,
    folder: Path,
    *,
    limit_s: float,
    seed: int,
    widths: Sequence[int] = WIDTHS,
    chunks: Sequence[int] = CHUNKS,
) -> Found:
    """Tune a case for about as long; a replay that has begun is not given up."""
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    up_s = 0.0

    @contextmanager
    def start(arguments: Arguments) -> Iterator[Server]:
        nonlocal up_s
        spec = ServerSpec(
            model=setting.model,
            served_model_name="m",
            arguments={**setting.case.base_arguments, **arguments},
        )
        started_s = time.monotonic()
        try:
            with engine.launch(spec, log_path=folder / "server.log") as server:
                yield _Loaded(setting, server, seed)
        finally:
            up_s += time.monotonic() - started_s

    best, found = tune(
        start,
        setting.case.limits,
        widths=widths,
        chunks=chunks,
        left_s=lambda: began_s + limit_s - time.monotonic(),
        found=Found({}, 0.0, 0, 0),
    )
    of = len(widths) * len(chunks)
    says = f"{found.launches} of {of} configurations"
    return replace(
        found,
        arguments={} if best is None else best.arguments,
        wall_s=time.monotonic() - began_s,
        servers_s=up_s,
        says=says if best is not None else f"{says}, none of which met the goal",
        details={} if best is None else asdict(best),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=sorted(cases()))
    parser.add_argument("--model", required=True, help="of SmolLM2-135M-Instruct")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS)
    options = parser.parse_args()
    setting = Setting(cases()[options.case], options.model, options.engine)
    try:
        with setting.start() as engine, tempfile.TemporaryDirectory() as folder:
            found = auto_tune(
                setting,
                engine,
                Path(folder),
                limit_s=options.minutes * 60,
                seed=options.seed,
                widths=options.widths,
                chunks=options.chunks,
            )
    except KvtuneError as error:
        raise SystemExit(f"{error.message}; {error.fix}") from error
    say(f"chosen: {found.settings}")
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
