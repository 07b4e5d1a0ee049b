"""Load a workload from a file of any known format, and hold part of it out for confirmation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from random import Random

from kvtune.errors import BadInput, BadTrace
from kvtune.profilers.fingerprint import fingerprint
from kvtune.profilers.traces.base import TraceFormat, read_head
from kvtune.registry import discover
from kvtune.types import Request, Workload

_Numbered = tuple[int, Request]


def trace_formats() -> dict[str, type[TraceFormat]]:
    """Every known trace format by name."""
    return discover("kvtune.profilers.traces", TraceFormat, group="kvtune.trace_formats")


def stream_requests(
    path: str | Path, format: str | None = None, *, skipped: Counter[str] | None = None
) -> Iterator[Request]:
    """Stream the requests of a workload file without loading it.

    `format` is a name of `trace_formats`; without it the format is recognised from the content.
    `skipped` counts, by reason, the records that are no requests to replay.

    Raises:
        NotFound: there is no such file.
        BadInput: an unknown format, or a file in none of them.
        BadTrace: a line that cannot be used (also while streaming), or no requests at all.
    """
    path = Path(path)
    reader = _named_format(format) if format else _recognised_format(path)
    return _not_empty(reader, path, Counter() if skipped is None else skipped)


def load_workload(
    path: str | Path,
    *,
    format: str | None = None,
    limit: int | None = None,
    heldout_share: float = 0.25,
    seed: int = 0,
    name: str | None = None,
    count_tokens: Callable[[str], Sequence[int]] | None = None,
    skipped: Counter[str] | None = None,
) -> Workload:
    """Read the first `limit` requests of a file (all by default) and split them.

    About `heldout_share` of the requests (0 <= share < 1) are held out; both parts keep the arrival
    order, and a conversation is never divided. With arrival times, the held-out part is one span
    of the trace and the gap it leaves is closed, so that both parts keep the rate and the bursts
    of the whole; each begins at 0. Without them it is a random sample. `seed` chooses which. A
    workload of one conversation or request holds nothing out.

    The fingerprint covers all requests before the split; `count_tokens` is as in `fingerprint`.

    Raises:
        NotFound, BadInput, BadTrace: as `stream_requests`; BadInput also for a bad limit or share.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"the limit must be at least 1 request, got {limit}")
    if not 0 <= heldout_share < 1:
        raise BadInput(
            f"the held-out share must be at least 0 and below 1, got {heldout_share}",
            "A quarter (0.25) is the default.",
        )
    path = Path(path)
    requests = tuple(islice(stream_requests(path, format, skipped=skipped), limit))
    tune, heldout = split(requests, heldout_share, seed)
    return Workload(
        name=name or path.name.split(".")[0],
        source=str(path),
        requests=tune,
        heldout=heldout,
        fingerprint=fingerprint(requests, count_tokens=count_tokens),
    )


def split(
    requests: Sequence[Request], heldout_share: float, seed: int
) -> tuple[tuple[Request, ...], tuple[Request, ...]]:
    """Split requests in arrival order into those to tune on and those held out.

    See `load_workload` for what each part keeps.
    """
    units = _units(requests)
    target = math.ceil(heldout_share * len(requests))
    if not target or len(units) < 2:
        return tuple(requests), ()
    timed = all(request.arrival_s is not None for request in requests)
    order = _span(units, target, Random(seed)) if timed else list(range(len(units)))
    if not timed:
        Random(seed).shuffle(order)
    held: set[int] = set()
    size = 0
    for index in order[: len(units) - 1]:
        if size >= target:
            break
        held.add(index)
        size += len(units[index])
    if timed:
        units = _close_gap(units, held)
    return (
        _merge([unit for index, unit in enumerate(units) if index not in held], timed),
        _merge([unit for index, unit in enumerate(units) if index in held], timed),
    )


def _units(requests: Sequence[Request]) -> list[list[_Numbered]]:
    """What must stay together: conversations, and single requests, by their first request."""
    units: dict[object, list[_Numbered]] = {}
    for index, request in enumerate(requests):
        units.setdefault(request.conversation or index, []).append((index, request))
    return list(units.values())


def _span(units: Sequence[Sequence[_Numbered]], target: int, random: Random) -> list[int]:
    """Consecutive units from a random one after which at least `target` requests follow."""
    following = 0
    last_start = len(units)
    while following < target:
        last_start -= 1
        following += len(units[last_start])
    return list(range(random.randint(0, last_start), len(units)))


def _close_gap(units: Sequence[Sequence[_Numbered]], held: set[int]) -> list[list[_Numbered]]:
    """Move the units after the held-out span forward by its length, each as a whole."""
    starts_s = [unit[0][1].arrival_s or 0.0 for unit in units]
    after = max(held) + 1
    gap_s = starts_s[after] - starts_s[min(held)] if after < len(units) else 0.0
    return [
        _shifted(unit, gap_s) if index >= after else list(unit) for index, unit in enumerate(units)
    ]


def _merge(units: Sequence[Sequence[_Numbered]], timed: bool) -> tuple[Request, ...]:
    numbered = [item for unit in units for item in unit]
    if not timed:
        return tuple(request for _, request in sorted(numbered, key=lambda item: item[0]))
    numbered.sort(key=lambda item: (item[1].arrival_s, item[0]))
    return tuple(request for _, request in _shifted(numbered, numbered[0][1].arrival_s or 0.0))


def _shifted(unit: Sequence[_Numbered], earlier_s: float) -> list[_Numbered]:
    return [
        (index, replace(request, arrival_s=round((request.arrival_s or 0.0) - earlier_s, 6)))
        for index, request in unit
    ]


def _named_format(name: str) -> type[TraceFormat]:
    formats = trace_formats()
    if name not in formats:
        near = get_close_matches(name, formats, 1)
        raise BadInput(
            f"there is no trace format {name!r}; there are {', '.join(formats)}",
            f"Did you mean {near[0]!r}?" if near else "",
        )
    return formats[name]


def _recognised_format(path: Path) -> type[TraceFormat]:
    head = read_head(path)
    formats = trace_formats()
    found = [reader for reader in formats.values() if reader.sniff(path, head)]
    if len(found) > 1:
        names = ", ".join(reader.name for reader in found)
        raise BadInput(f"{path} could be any of {names}", "Name its format with --format.")
    if not found:
        raise BadInput(
            f"{path} is in no known trace format (tried {', '.join(formats)}); "
            f"it begins with {head.strip()[:60]!r}",
            'Write one JSON object a line, such as {"prompt": "..."}, or name the format with '
            "--format.",
        )
    return found[0]


def _not_empty(reader: type[TraceFormat], path: Path, skipped: Counter[str]) -> Iterator[Request]:
    request = None
    for request in reader.read(path, skipped):
        yield request
    if request is None:
        reasons = "; ".join(f"{count} {reason} skipped" for reason, count in skipped.items())
        raise BadTrace(str(path), 1, f"there are no requests in it{reasons and f': {reasons}'}")
