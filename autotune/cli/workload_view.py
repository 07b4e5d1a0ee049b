"""Workloads and rooflines in the terminal, as bars; readable from 80 columns on."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.report.view import (
    ProfileView,
    WorkloadView,
    prefix_notes,
    rate_text,
    work_text,
)
from kvtune.autotune.words import amount, digits, duration
from kvtune.profilers.arrivals import Arrivals
from kvtune.profilers.roofline import Roofline
from kvtune.profilers.step_parts import StepParts
from kvtune.types import Histogram

BAR_COLUMNS = 40
LEVELS = " ▁▂▃▄▅▆▇█"


def print_workload(view: WorkloadView) -> None:
    """Show what a workload looks like."""
    stdout.print(view.summary, soft_wrap=True)
    _print_shape(view)
    _print_reuse(view, None, None)
    for entry in view.missing:
        stdout.print(f"[dim]not known: {escape(entry)}[/dim]", soft_wrap=True)


def print_profile_view(view: ProfileView) -> None:
    """Show what a profile says beside its verdict: the step, the load and the roofline."""
    if view.parts is not None:
        _print_parts(view.parts)
    if view.workload.prompts is not None:
        name = escape(view.workload.name or "on the server")
        stdout.print(f"\nWorkload {name}: {view.workload.summary}", soft_wrap=True)
        _print_shape(view.workload)
    _print_reuse(view.workload, view.block_tokens, view.prefix.hits)
    for note in prefix_notes(view):
        stdout.print(f"- {escape(note)}", soft_wrap=True)
    _print_roofline(view.roofline)


def sparkline(values: tuple[float, ...]) -> str:
    """Values as one row of bars; what is not 0 shows."""
    most = max(values, default=0.0) or 1.0
    top = len(LEVELS) - 1
    return "".join(LEVELS[min(top, -int(-top * value // most))] for value in values)


def _print_shape(view: WorkloadView) -> None:
    for title, lengths in (("prompt", view.prompts), ("output", view.answers)):
        if lengths is not None:
            _print_lengths(title, lengths)
    if view.arrivals is not None:
        _print_arrivals(view.arrivals, view.arrivals_are)


def _print_lengths(title: str, found: Histogram) -> None:
    known = {"mean": found.mean, "p50": found.p50, "p95": found.p95, "p99": found.p99}
    words = ", ".join(f"{name} {amount(value)}" for name, value in known.items() if value)
    stdout.print(f"\n{title} tokens: {words}")
    most = max(found.counts, default=0) or 1
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        stdout.print(f"  {low:>8,.0f} to {high:<8,.0f} {count:>8,} {_bar(count / most)}")


def _print_arrivals(found: Arrivals, what: str) -> None:
    most = digits(max(found.rates_per_s))
    stdout.print(f"\narrivals {what}, each {digits(found.bin_s)} s; at most {most} a second")
    stdout.print(f"  {sparkline(found.rates_per_s)}")


def _print_reuse(view: WorkloadView, block_tokens: int | None, served: float | None) -> None:
    if view.reusable:
        sampled = view.fingerprint is not None and view.fingerprint.sampled
        about = " (estimated from a sample of blocks)" if sampled else ""
        stdout.print(f"\nReusable share of prompt tokens by block size{about}:")
        for size, share in view.reusable.items():
            own = "  the server's" if size == block_tokens else ""
            stdout.print(f"  {size:>6} {share:6.1%} {_bar(share)}{own}")
    if served is not None:
        stdout.print(f"  served {served:6.1%} {_bar(served)}")


def _print_parts(parts: StepParts) -> None:
    length = "" if parts.step_s is None else f" of {duration(parts.step_s)}"
    how = "" if parts.is_fitted else ", as of an ideal device"
    stdout.print(f"\nA mean step{length}{how}:")
    times: Mapping[str, str] = {
        name: "" if parts.step_s is None else duration(share * parts.step_s)
        for name, share in parts.shares.items()
    }
    for name, share in parts.shares.items():
        stdout.print(f"  {name:<20} {times[name]:>8} {share:>4.0%} {_bar(share)}")


def _print_roofline(found: Roofline) -> None:
    if found.work:
        ridge = ""
        if found.ridge is not None:
            ridge = (
                f", read {rate_text(found.read_bytes_per_s or 0.0, 'B/s')} and "
                f"{rate_text(found.matrix_flop_per_s or 0.0, 'flop/s')}: equal at "
                f"{digits(found.ridge)} flop/byte"
            )
        stdout.print(f"\nRoofline of the device{ridge}:", soft_wrap=True)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("work", "holds"):
            table.add_column(title)
        for title in ("flop/byte", "held by", "of its roof"):
            table.add_column(title, justify="right", no_wrap=True)
        for work in found.work:
            reached = found.reached(work)
            table.add_row(
                work.kind,
                work_text(work),
                digits(work.intensity),
                found.held_by(work) or "-",
                "-" if reached is None else f"{reached:.0%}",
            )
        stdout.print(table)
    for entry in found.missing:
        stdout.print(f"[dim]roofline without {escape(entry)}[/dim]", soft_wrap=True)


def _bar(share: float) -> str:
    return "█" * round(BAR_COLUMNS * min(1.0, share))
