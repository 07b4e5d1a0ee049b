"""The results of the labelled suite as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from verdict_forecasts import forecasts, misses
from verdict_results import HELPS, STEP, RegimeResult, Results, is_as_expected, is_right, ratio
from verdict_table import table

from kvtune.profilers.statistics import Estimate
from kvtune.profilers.step_signs import PEAK_LEAST_SHARE
from kvtune.types import Bottleneck, StepTimeModel, Verdict

MIXED = "mixed"


def render(results: Results) -> str:
    """The page: verdicts, causes, forecasts, and how each number was obtained."""
    judged = [regime for regime in results.regimes if regime.verdict is not None]
    parts = [
        _head(results),
        _verdicts(judged),
        _confusion(judged),
        _built(judged),
        _causes(judged),
        forecasts(results),
        misses(results),
        _method(results),
    ]
    failed = [regime for regime in results.regimes if regime.problem]
    if failed:
        lines = [f"- `{regime.name}`: {regime.problem}" for regime in failed]
        parts.append("## Regimes that could not be run\n\n" + "\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def _rounds(results: Results) -> str:
    """How often loads took turns: a run that was resumed may have another number from there on."""
    counts = {len(regime.baseline) for regime in results.regimes if not regime.problem}
    return " or ".join(str(count) for count in sorted(counts))


def _head(results: Results) -> str:
    device, ceilings, engine = results.device, results.ceilings, results.engine
    minutes = sum(regime.wall_s for regime in results.regimes) / 60
    loads = [regime.load_average for regime in results.regimes if not regime.problem]
    busy = f", load average before a regime {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return f"""# Verdicts and forecasts against known truths

Made by [`benchmarks/verdicts.py`](../benchmarks/README.md) from its results.

- {device.name}, {device.count} CPUs{busy}
- measured at the start: {ceilings.read_bytes_per_s / 1e9:.1f} GB/s of reads,
  {ceilings.matrix_flop_per_s / 1e12:.2f} TFLOP/s in {ceilings.matrix_dtype}
- {engine.distribution} {engine.version}, {results.model}, kvtune {results.kvtune}
- {_rounds(results)} rounds, seed {results.seed}, {minutes:.0f} minutes, {results.measured_at}"""


def _verdicts(regimes: Sequence[RegimeResult]) -> str:
    right = sum(is_right(regime, regime.verdict) for regime in regimes)
    abstained = sum(_is_abstained(regime, regime.verdict) for regime in regimes)
    rows = [
        [
            f"`{regime.name}`",
            _truth(regime),
            _answer(regime, regime.verdict),
            regime.verdict.confidence if regime.verdict else "",
            _shares(regime.verdict),
            f"{regime.verdict_s:.0f}",
            _answer(regime, regime.unprobed),
            _answer(regime, regime.counters_only),
        ]
        for regime in regimes
    ]
    slowest = max((regime.verdict_s for regime in regimes), default=0.0)
    longest = max((regime.load_s for regime in regimes), default=0.0)
    unprobed = sum(is_right(regime, regime.unprobed) for regime in regimes)
    counted = sum(is_right(regime, regime.counters_only) for regime in regimes)
    wrong = len(regimes) - right - abstained
    return f"""## Verdicts

{right} of {len(regimes)} are right, {abstained} abstain, {wrong} are wrong. The slowest took
{slowest:.0f} s from the first request. Judged by the same load alone, of {longest:.0f} s at most
and without the probe, {unprobed} are right; by the server's counters during it, {counted}: so much
tells a watch of somebody who knows the checkpoint and sends nothing.

{
        table(
            [
                "regime",
                "truth",
                "verdict",
                "sure",
                "shares of a step",
                "s",
                "no probe",
                "only watched",
            ],
            rows,
        )
    }{_weights_note(regimes)}"""


def _weights_note(regimes: Sequence[RegimeResult]) -> str:
    """Why a verdict may be weight-bandwidth beside a larger share of overhead."""
    named = [
        f"`{regime.name}`"
        for regime in regimes
        if (verdict := regime.verdict) is not None
        and is_right(regime, verdict)
        and verdict.bottleneck is Bottleneck.WEIGHT_BANDWIDTH
        and verdict.shares.get(Bottleneck.OVERHEAD, 0.0)
        > verdict.shares.get(Bottleneck.WEIGHT_BANDWIDTH, 0.0)
    ]
    if not named:
        return ""
    return f"""

{" and ".join(named)}: weight-bandwidth beside a larger share of overhead is no slip. The share of
weights is the time that their bytes take at the best speed measured of the memory, which kernels do
not reach: the least that they take, and what they take beyond it is counted as overhead. So the
fixed price of a step is named after weights once that least is {PEAK_LEAST_SHARE:.0%} of it."""


def _confusion(regimes: Sequence[RegimeResult]) -> str:
    said = [_said(regime) for regime in regimes]
    columns = [word for word in [*Bottleneck, MIXED] if word in said]
    truths = list(dict.fromkeys(_truth_word(regime) for regime in regimes))
    rows = [
        [
            f"**{truth}**",
            *(
                str(
                    sum(
                        _truth_word(regime) == truth and _said(regime) == word for regime in regimes
                    )
                    or ""
                )
                for word in columns
            ),
        ]
        for truth in truths
    ]
    return (
        "Truth by row, verdict by column; `mixed` is right if its two largest shares are:\n\n"
        + (table(["", *map(str, columns)], rows))
    )


def _built(regimes: Sequence[RegimeResult]) -> str:
    rows = [
        [
            f"`{regime.name}`",
            regime.built,
            " ".join(f"--{name} {value}" for name, value in regime.arguments.items()),
            _step(regime.step_time),
        ]
        for regime in regimes
    ]
    return "## How the regimes are built\n\n" + table(
        ["regime", "load", "engine", "a decode step, ms (sequence, 1,000 KV tokens, error)"], rows
    )


def _causes(regimes: Sequence[RegimeResult]) -> str:
    rows, agreed, asked = [], 0, 0
    for regime in regimes:
        for arm in regime.arms:
            found = is_as_expected(regime, arm)
            asked += found is not None
            agreed += bool(found)
            rows.append(
                [
                    f"`{regime.name}`",
                    arm.name + ("" if arm.is_engine else " \\*"),
                    arm.expected,
                    arm.problem or _ratio(ratio(regime, arm)),
                    _ratio(ratio(regime, arm, STEP)),
                    {None: "", True: "yes", False: "**no**"}[found],
                ]
            )
    return f"""## Moving the lever, and moving others

{agreed} of {asked} did as the truth says. A lever helps if it raises goodput by {HELPS:.0%} or more
and in every round, and hurts if it lowers it as much. Ratios to the baseline of the same round,
with a 95% interval over rounds. Arms with a \\* move the load or the model: no argument of the
engine moves what binds there.

{table(["regime", "arm", "truth says", "goodput", "decode step", "agrees"], rows)}"""


def _method(results: Results) -> str:
    return f"""## How each number was obtained

- *Verdict, shares, forecasts*: what `kvtune profile --model` does, through its own functions: the
  load once (one request of warm-up), then the 30 s probe. Seconds count from the first request of
  the warm-up to the verdict; the forecasts come after it.
- *No probe* judges that same run without the probe. *Only watched* judges its counters and gauges
  alone, without the client's records, the workload's fingerprint, or the figures of a client.
- *Arms*: the baseline and the arms have fresh servers side by side, not the one that was profiled,
  which was slower than they; idle ones take no CPU. Loads take turns,
  {_rounds(results)} times over, another one first each time, with prompts that nobody has seen: one
  run a round and arm. Goodput counts the requests that keep the limit of the regime's goal.
- *Measured* is the ratio of geometric means over rounds. KV tokens are those that the engine
  reports when it has started.
- Ceilings are the best of short runs and hold for a quiet machine; a busy one gives lower ones."""


def _is_abstained(regime: RegimeResult, verdict: Verdict | None) -> bool:
    return (
        verdict is not None
        and verdict.bottleneck is Bottleneck.ABSTAIN
        and not is_right(regime, verdict)
    )


def _truth(regime: RegimeResult) -> str:
    return " and ".join(regime.truth)


def _truth_word(regime: RegimeResult) -> str:
    return regime.truth[0] if len(regime.truth) == 1 else MIXED


def _said(regime: RegimeResult) -> str:
    """The verdict, where shares are the truth and the two largest are right: mixed."""
    if len(regime.truth) > 1 and is_right(regime, regime.verdict):
        return MIXED
    return regime.verdict.bottleneck if regime.verdict else ""


def _answer(regime: RegimeResult, verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    word = str(verdict.bottleneck)
    return word if is_right(regime, verdict) else f"**{word}**"


def _shares(verdict: Verdict | None) -> str:
    shares = {} if verdict is None else verdict.shares
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _step(model: StepTimeModel | None) -> str:
    if model is None:
        return "no model"
    return (
        f"{1000 * model.fixed_s.estimate:.1f} ({1000 * model.per_sequence_s.estimate:.2f}, "
        f"{1e6 * model.per_kv_token_s.estimate:.2f}, {model.error_share:.0%}; {model.source})"
    )


def _ratio(found: Estimate | None) -> str:
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.estimate:.2f}"
    return f"{found.estimate:.2f} ({found.low:.2f} to {found.high:.2f})"
