"""What earlier trials on a device say of forecasts: how far off they were, and what reads cost.

How far a forecast is off is taken from those that trials measured, at the rank that split conformal
prediction takes (Lei et al., "Distribution-free predictive inference for regression", 2018). What a
cached token of a number format takes to read comes from the steps of trials with that format: what
is left of them when the fixed part and that of the sequences are taken away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from pydantic import JsonValue

from kvtune.errors import BadInput
from kvtune.policies.capacity import SKIP
from kvtune.policies.plugin_arguments import asked_by, kv_format
from kvtune.profilers.step_gaps import observations
from kvtune.store.database import Store
from kvtune.store.rows import TrialRow
from kvtune.types import (
    Device,
    EffectiveConfig,
    EngineInfo,
    Forecast,
    Profile,
    RequestRecord,
    StepTimeModel,
)

WITHIN = 0.8
"""Share of measurements that are to lie within a range."""

LEAST_OUTCOMES = 5
MOST_TRIALS = 5
"""Trials of a format that are looked at in a study."""

LEAST_SPREAD = 0.15
"""How far a ratio of reads may be off at least, as a share of it: it is a small difference of times
that were measured minutes apart."""

LEAST_READ_SHARE = 0.1
"""Share of a step below which the reads in it say nothing of what a read costs."""

ABOUT_THE_START = {"start_kind", "source"}
"""Fields of an effective configuration that say nothing of how fast the engine is."""


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """Time to read a cached token over that in the model's own format: least, expected, most."""

    ratios: tuple[float, float, float]
    trials: int


@dataclass(frozen=True, slots=True)
class Experience:
    """By metric, the share of a told ratio within which most measured ones were; reads by format.

    A format is a `--kv-cache-dtype`, or a store of kvtune's plugin (`store int8`).
    `copy_bytes_per_s` is the device's ceiling: bytes read and written.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, MeasuredRead] = field(default_factory=dict)
    copy_bytes_per_s: float | None = None


def experience_of(store: Store, device: Device, engine: EngineInfo) -> Experience:
    """What the studies of one engine on one device say."""
    names = [
        one.name
        for one in store.studies()
        if one.device.key == device.key and _is_same(one.engine, engine)
    ]
    ceilings = store.ceilings(device.key)
    copy_bytes_per_s = None if ceilings is None else ceilings.copy_bytes_per_s
    known = set(names)
    outcomes = [told for told in store.forecasts() if told.study in known]
    return Experience(errors_of(outcomes), _reads(store, names), copy_bytes_per_s)


def errors_of(outcomes: Sequence[Forecast]) -> dict[str, float]:
    """By metric; none for a metric with too few outcomes. Counts of capacity have no error.

    `outcomes` are newest first. What was told several times before one trial measured it counts
    once: these are no outcomes of their own.
    """
    off: dict[str, list[float]] = {}
    counted: set[tuple[str, str | None, float | None, float | None]] = set()
    for told in outcomes:
        ratio, found = told.ratio, told.measured_ratio
        trial = (told.metric, told.study, told.measured, told.measured_baseline)
        if trial in counted or ratio is None or ratio.method == "by formula":
            continue
        if ratio.estimate > 0 and found:
            counted.add(trial)
            off.setdefault(told.metric, []).append(abs(math.log(found / ratio.estimate)))
    return {
        metric: math.expm1(sorted(values)[math.ceil((len(values) + 1) * WITHIN) - 1])
        for metric, values in off.items()
        if len(values) >= LEAST_OUTCOMES
    }


def probed_step_time(
    profiles: Sequence[Profile],
    *,
    model: str,
    engine: EngineInfo,
    device: Device,
    effective: EffectiveConfig | None,
) -> StepTimeModel | None:
    """The first model that a probe of the same engine in the same state gave on such a device."""
    if effective is None:
        return None
    same = effective.model_dump(exclude=ABOUT_THE_START)
    for profile in profiles:
        if (
            profile.step_time is not None
            and profile.step_time.source == "probe"
            and profile.model == model
            and profile.engine is not None
            and _is_same(profile.engine, engine)
            and profile.device is not None
            and profile.device.key == device.key
            and profile.effective is not None
            and profile.effective.model_dump(exclude=ABOUT_THE_START) == same
        ):
            return profile.step_time
    return None


def _is_same(one: EngineInfo, other: EngineInfo) -> bool:
    """Whether two are the same build; a plugin beside it does nothing unless it is asked to."""
    return one.model_copy(update={"plugin": other.plugin}) == other


def read_ratio(
    model: StepTimeModel,
    plain: Sequence[RequestRecord],
    changed: Sequence[RequestRecord],
) -> float | None:
    """Time to read a cached token in the run of `changed` over that in the run of `plain`.

    `model` is of the engine that served `plain`. Machines drift, so that it is scaled to that run
    first. None where too little of a step is reading.
    """
    found = []
    for records in (plain, changed):
        seen = observations(records)
        clear = seen.where(seen.is_clear)
        if not len(clear):
            return None
        found.append(clear)
    base, other = found
    fixed, sequence, token = (
        part.estimate for part in (model.fixed_s, model.per_sequence_s, model.per_kv_token_s)
    )
    steps_s = fixed + sequence * base.sequences + token * base.resident_tokens
    drift = median((base.step_s / steps_s).tolist())
    reading_s = drift * token * other.resident_tokens
    rest_s = drift * (fixed + sequence * other.sequences)
    if median((reading_s / (reading_s + rest_s)).tolist()) < LEAST_READ_SHARE:
        return None
    found_ratio: float = median(((other.step_s - rest_s) / reading_s).tolist())
    return max(found_ratio, 0.0)


def measured_read(ratios: Sequence[float]) -> MeasuredRead:
    """The ratios of some trials together; there is at least one."""
    middle = fmean(ratios)
    apart = 1.28 * stdev(ratios) if len(ratios) > 1 else 0.0
    off = max(apart, LEAST_SPREAD * middle)
    return MeasuredRead((max(middle - off, 0.0), middle, middle + off), len(ratios))


def _reads(store: Store, studies: Sequence[str]) -> dict[str, MeasuredRead]:
    profiles = [row.profile for row in store.profiles()]
    found: dict[str, list[float]] = {}
    for name in studies:
        study = store.study(name)
        rows = {row.number: row for row in store.trials(name)}
        base = rows.get(0)
        if study is None or base is None or base.measurement is None:
            continue
        model = probed_step_time(
            profiles,
            model=study.model,
            engine=study.engine,
            device=study.device,
            effective=base.measurement.effective,
        )
        if model is None or _format_read(base.trial.arguments) != "auto":
            continue
        plain = _records(store, base)
        by_format: dict[str, list[float]] = {}
        for number, row in sorted(rows.items()):
            if (held := _format_read(row.trial.stack.arguments)) is None:
                continue
            known = by_format.setdefault(held, [])
            if number == 0 or len(known) >= MOST_TRIALS:
                continue
            if (ratio := read_ratio(model, plain, _records(store, row))) is not None:
                known.append(ratio)
        # Trials that read as the baseline does show how much slower the machine was meanwhile.
        same = median(by_format.pop("auto", []) or [1.0])
        for held, ratios in by_format.items():
            if same > 0:
                found.setdefault(held, []).extend(ratio / same for ratio in ratios)
    return {held: measured_read(ratios) for held, ratios in found.items() if ratios}


def _format_read(arguments: Mapping[str, JsonValue]) -> str | None:
    """In what format decode steps read all that is cached; None: not all, or not in one.

    None too for what this version of the plugin does not know: a history may be older, or newer.
    """
    try:
        asked = asked_by(arguments)
    except BadInput:
        return None
    parts = (asked.quest, asked.streaming_llm, asked.page_eviction)
    if SKIP in arguments or any(part is not None for part in parts):
        return None
    return kv_format(arguments)


def _records(store: Store, row: TrialRow) -> Sequence[RequestRecord]:
    """The requests of a trial's first repeat."""
    repeats = store.records(row.study, row.number)
    return repeats[0] if repeats else ()
