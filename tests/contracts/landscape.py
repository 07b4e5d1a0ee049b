"""Searches on a landscape: a formula in the place of servers, so that a search is quick and exact.

What a landscape cannot show (servers that crash, canaries, interrupts in a replay) is tested on the
simulated engine.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

from kvtune.autotune.reporting import Quiet
from kvtune.profilers.fingerprint import fingerprint
from kvtune.types import (
    Device,
    Failure,
    FailureClass,
    Goal,
    LoadRun,
    Measurement,
    Request,
    RequestRecord,
    Slo,
    Status,
    Workload,
)

DEVICE = Device(kind="cpu", name="cpu", count=1, memory_bytes=8 << 30)
GOAL = Goal(slos=(Slo(metric="ttft", statistic="p95", limit_s=1.0),))
ONLY_BLOCK_SIZE = {
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256",
    "max-num-seqs": 4,
    "max-num-active-seqs": 4,
    "max-num-batched-tokens": 512,
    "scheduler-reserve-full-isl": True,
    "watermark": 0.0,
}
"""Base arguments that leave four lossless points, the block sizes, and three KV formats each."""

FEW_POINTS = {name: value for name, value in ONLY_BLOCK_SIZE.items() if name != "watermark"}
"""Those that leave twenty: four block sizes with five watermarks, and three KV formats each."""

RIGHT = ("the number 7194", "the code is 5823", "train number 3461")
WRONG = ("rursrs", "rursrs", "rursrs")


def requests(count, first=0):
    return tuple(
        Request(input_tokens=24 + number, output_tokens=4) for number in range(first, first + count)
    )


def workload(tuned=8, heldout=4):
    everything = requests(tuned + heldout)
    return Workload(
        name="w",
        source="w.jsonl",
        requests=everything[:tuned],
        heldout=everything[tuned:],
        fingerprint=fingerprint(everything),
    )


def failed(failure=FailureClass.CRASH_UNDER_LOAD, message="it died"):
    return Measurement(
        status=Status.FAILED,
        failure=Failure(failure=failure, message=message, log_excerpt="the decisive line"),
        wall_s=1.0,
    )


def run_of(in_flight=4):
    """A second of load with `in_flight` requests at once."""
    records = tuple(
        RequestRecord(index, 0.0, 0.0, 0.1, 1.0, (0.1,) * 3, 24, 4, 4) for index in range(in_flight)
    )
    return LoadRun(records, 1.0, 0.0, {}, {})


@dataclass
class Landscape:
    """Measures by formula. `goodput(arguments)` is a figure of `metric`, or a failed `Measurement`.

    `asked` holds every measurement that was really made. Each takes `trial_s` of `now_s`, which is
    the clock of the search. `interrupt_at` is the measurement, from 0, that Ctrl-C falls into.
    `outputs(trial)` is what its answers looked like, `None` where nobody looked. `effective(
    arguments)` is what the engine says that it runs with, `None` where it says nothing.
    `serve(arguments)` is the server that can be asked once it was measured; without one there is
    none.
    """

    goodput: callable = lambda arguments: 1.0
    ttft_s: callable = lambda arguments: 0.5
    canary: callable = lambda arguments: RIGHT
    outputs: callable = lambda trial: None
    effective: callable = lambda arguments: None
    metric: str = "goodput_requests_per_s"
    trial_s: float = 1.0
    interrupt_at: int | None = None
    serve: callable = None
    now_s: float = 0.0
    asked: list = field(default_factory=list)

    def clock(self):
        return self.now_s

    def run_trial(self, trial, bench, requests, *, canary, label, afterwards, watch=None):
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append(
            SimpleNamespace(
                trial=trial, requests=requests, canary=canary, arguments=trial.arguments
            )
        )
        self.now_s += self.trial_s
        goodput = self.goodput(trial.arguments)
        if isinstance(goodput, Measurement):
            return goodput, ()
        # Rounds differ a little, so that intervals have a width, and trials of one round do not.
        noise = 1 + 0.001 * (trial.seed % 3)
        measurement = Measurement(
            status=Status.OK,
            metrics={
                self.metric: (goodput * noise,) * trial.repeats,
                "ttft_p95_s": (self.ttft_s(trial.arguments),) * trial.repeats,
            },
            wall_s=self.trial_s,
            effective=self.effective(trial.arguments),
            outputs=self.outputs(trial),
            canary_answers=self.canary(trial.arguments) if canary else None,
        )
        bench.interrupts.hold()
        if afterwards is not None and self.serve is not None:
            measurement = afterwards(trial, self.serve(trial.arguments), measurement)
        return measurement, (run_of(),) * trial.repeats

    @property
    def points(self):
        """The arguments of what was measured before the confirmation."""
        return [one.arguments for one in self.asked if one.trial.parent is None]

    @property
    def confirmed(self):
        """Which trial each confirming measurement was of, in order."""
        return [one.trial.parent for one in self.asked if one.trial.parent is not None]


class Recorder(Quiet):
    """Keeps what a search says."""

    def __init__(self):
        self.notes = []
        self.trials = []

    def note(self, text):
        self.notes.append(text)

    def trial(self, trial, measurement, *, reused):
        self.trials.append((trial, measurement, reused))
