"""What a reader of a run has to know before trusting its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtune.types import RequestRecord

LATE_LIMIT_S = 0.010
_KINDS_SHOWN = 3


def run_warnings(
    records: Sequence[RequestRecord], *, without_usage: int, keeps_schedule: bool
) -> list[str]:
    """Return one sentence for each thing that is off about `records`.

    `without_usage` counts completed requests whose tokens the server did not count;
    `keeps_schedule` says that requests were to be sent exactly when they were due.
    """
    warnings = [_failures(records), _token_counts(records)]
    if without_usage:
        warnings.append(
            f"the server reported no usage in {without_usage} of {len(records)} requests: their "
            "output tokens are counted as messages"
        )
    if keeps_schedule:
        warnings.append(_lateness(records))
    return [warning for warning in warnings if warning]


def _failures(records: Sequence[RequestRecord]) -> str:
    errors = Counter(record.error or "no token came back" for record in records if not record.ok)
    if not errors:
        return ""
    shown = "; ".join(f"{error} ({count})" for error, count in errors.most_common(_KINDS_SHOWN))
    more = f"; and {len(errors) - _KINDS_SHOWN} other errors" if len(errors) > _KINDS_SHOWN else ""
    return (
        f"{sum(errors.values())} of {len(records)} requests failed, and no latency counts them: "
        f"{shown}{more}"
    )


def _token_counts(records: Sequence[RequestRecord]) -> str:
    off = [item for item in records if item.ok and item.output_tokens != len(item.gaps_s) + 1]
    if not off:
        return ""
    tokens = sum(record.output_tokens for record in off)
    messages = sum(len(record.gaps_s) + 1 for record in off)
    return (
        f"in {len(off)} of {len(records)} requests the server counted {tokens} tokens in "
        f"{messages} messages: their gaps are between messages, not tokens"
    )


def _lateness(records: Sequence[RequestRecord]) -> str:
    late = sorted(record.sent_s - record.scheduled_s for record in records)
    if not late:
        return ""
    p99_s = late[(len(late) * 99 - 1) // 100]
    if p99_s <= LATE_LIMIT_S:
        return ""
    return (
        f"client late: p99 of sending is {p99_s * 1000:.1f} ms after the due time "
        f"(limit {LATE_LIMIT_S * 1000:.0f} ms); the load was less bursty than the workload"
    )
