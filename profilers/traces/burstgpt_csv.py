"""BurstGPT traces: arrival times, lengths and, in newer files, sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtune.profilers.traces.base import Arrivals, TraceFormat, csv_rows, first_columns
from kvtune.types import Request


class BurstGptCsv(TraceFormat):
    """CSV with the columns Timestamp (seconds), Request tokens and Response tokens.

    Rows with 0 response tokens are requests that failed: they are skipped and counted. The column
    Session ID, where there is one, names the conversation; Model, Total tokens and Log Type are
    not used.
    """

    name = "burstgpt_csv"
    title = "BurstGPT CSV (arrival times and lengths)"
    columns = ("Timestamp", "Request tokens", "Response tokens")

    @classmethod
    def sniff(cls, path: Path, head: str) -> bool:
        """Whether the header has the columns."""
        return first_columns(head).issuperset(cls.columns)

    @classmethod
    def read(cls, path: Path, skipped: Counter[str]) -> Iterator[Request]:
        """Stream the requests that did not fail."""
        arrivals = Arrivals()
        for row in csv_rows(path, cls.columns):
            time_s = row.number("Timestamp")
            input_tokens = row.whole("Request tokens")
            output_tokens = row.whole("Response tokens")
            if not output_tokens:
                skipped["failed requests (0 response tokens)"] += 1
                continue
            if not input_tokens:
                skipped["requests without input tokens"] += 1
                continue
            session = str(row.fields.get("Session ID", ""))
            yield Request(
                arrival_s=arrivals.since_first_s(time_s, row),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                conversation=session or None,
            )
