"""Azure LLM inference traces (2023 and 2024): arrival times and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvtune.profilers.traces.base import Arrivals, Row, TraceFormat, csv_rows, first_columns
from kvtune.types import Request


class AzureCsv(TraceFormat):
    """CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    Timestamps are ISO 8601, with any number of fractional digits (read to the microsecond) and
    with or without an offset (none means UTC). A request of 0 tokens is skipped and counted.
    """

    name = "azure_csv"
    title = "Azure LLM inference CSV (arrival times and lengths)"
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether the header has the columns."""
        return first_columns(head).issuperset(cls.columns)

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the requests."""
        arrivals = Arrivals()
        for row in csv_rows(path, cls.columns):
            time_s = _timestamp_s(row)
            input_tokens = row.whole("ContextTokens")
            output_tokens = row.whole("GeneratedTokens")
            if not input_tokens or not output_tokens:
                skipped["requests without input or output tokens"] += 1
                continue
            yield Request(
                arrival_s=arrivals.since_first_s(time_s, row),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )


def _timestamp_s(row: Row) -> float:
    text = str(row.get("TIMESTAMP"))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        row.fail(f"'TIMESTAMP' must be a date and time, got {text!r}")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
