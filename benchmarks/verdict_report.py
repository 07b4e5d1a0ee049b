"""The results of the labelled suite as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from verdict_results import (
    CAPACITY,
    FORECAST_NO_CHANGE,
    HELPS,
    MEASURED_NO_CHANGE,
    STEP,
    Pair,
    RegimeResult,
    Results,
    is_as_expected,
    is_right,
    pairs,
    ratio,
    server_noise,
    untold,
)

from kvtune.autotune.forecast.score import NO_CHANGE, is_sign_right
from kvtune.profilers.statistics import Estimate
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
        _forecasts(results),
        _misses(results),
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
        _table(
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
    }"""


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
        + (_table(["", *map(str, columns)], rows))
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
    return "## How the regimes are built\n\n" + _table(
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
and in every round. Ratios to the baseline of the same round, with a 95% interval over rounds. Arms
with a \\* move the load or the model: no argument of the engine moves what binds there.

{_table(["regime", "arm", "truth says", "goodput", "decode step", "agrees"], rows)}"""


def _forecasts(results: Results) -> str:
    found = pairs(results)
    steps = pairs(results, STEP)
    if not found:
        return "## Forecasts\n\nNothing was forecast and measured."
    errors = [pair.error_points or 0.0 for pair in found]
    step_errors = [pair.error_points or 0.0 for pair in steps]
    step_line = (
        f"Of the decode step (median gap between tokens): {len(steps)} pairs, mean absolute error "
        f"{fmean(step_errors):.1f} points."
        if steps
        else ""
    )
    strict = [
        is_sign_right(pair.told.ratio.estimate, pair.measured)
        for pair in found
        if pair.told.ratio is not None
    ]
    capacity = _capacity_errors(results)
    worst = max(capacity, default=0.0)
    rows = [
        [
            f"`{pair.regime}`",
            pair.lever,
            _told(pair),
            f"{pair.measured - 1:+.0%}",
            f"{pair.noise:.0%}",
            f"{pair.error_points:.0f}",
            "yes" if pair.is_sign_right else "**no**",
            "yes" if pair.is_in_range else "no",
        ]
        for pair in found
    ]
    return f"""## Forecasts against measurements

{len(found)} pairs of goodput: sign right {_share([pair.is_sign_right for pair in found])}, mean
absolute error {fmean(errors):.1f} points, within the forecast range
{_share([pair.is_in_range for pair in found])}. {step_line}
KV tokens: {len(capacity)} pairs, largest error {worst:.2%} of what the engine reports.

The noise is the standard error of a ratio, of which servers that are started alike give the most:
their goodput differs by {server_noise(results):.1%} (standard deviation, from a second server of
each baseline). A forecast below {FORECAST_NO_CHANGE:.0%}, or below the noise, is one of no change,
which is right if less than {MEASURED_NO_CHANGE:.0%}, or than twice the noise, was measured.
Without any allowance for noise, as `kvtune history forecasts` counts (less than {NO_CHANGE:.0%}
on both sides is no change), the sign is right
{_share(strict)}.

{
        _table(
            [
                "regime",
                "lever",
                "forecast",
                "measured",
                "noise",
                "error, points",
                "sign",
                "in range",
            ],
            rows,
        )
    }"""


def _misses(results: Results) -> str:
    missed = [pair for pair in pairs(results) if not pair.is_sign_right or not pair.is_in_range]
    lines = [
        f"- `{pair.regime}`, {pair.lever}: forecast {_told(pair)}, measured "
        f"{pair.measured - 1:+.0%}. {pair.told.reason}"
        for pair in missed
    ]
    silent = [f"- `{regime.name}`, {arm.name}: {reason}" for regime, arm, reason in untold(results)]
    text = "### Misses\n\nOut of the range, or of the wrong sign:\n\n" + "\n".join(
        lines or ["- none"]
    )
    return text + "\n\nMeasured, but not forecast:\n\n" + "\n".join(silent or ["- none"])


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


def _capacity_errors(results: Results) -> list[float]:
    return [
        abs(told.predicted / arm.kv_tokens - 1)
        for regime in results.regimes
        for arm in regime.arms
        if (told := arm.told.get(CAPACITY)) is not None and told.predicted and arm.kv_tokens
    ]


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


def _told(pair: Pair) -> str:
    told = pair.told.ratio
    if told is None or told.low is None or told.high is None:
        return ""
    return f"{told.estimate - 1:+.0%} ({told.low - 1:+.0%} to {told.high - 1:+.0%})"


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits)} of {len(hits)} ({sum(hits) / len(hits):.0%})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
