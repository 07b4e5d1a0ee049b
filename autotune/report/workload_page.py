"""A workload as a page."""

from __future__ import annotations

from kvtune.autotune.report.figures_workload import (
    arrivals_figure,
    bin_names,
    lengths_figure,
    reuse_figure,
)
from kvtune.autotune.report.page import (
    Block,
    Bullets,
    Column,
    KeyFigure,
    KeyFigures,
    Page,
    Row,
    Section,
    Table,
)
from kvtune.autotune.report.view import WorkloadView
from kvtune.autotune.words import amount, digits
from kvtune.types import Histogram


def workload_page(view: WorkloadView) -> Page:
    """Lengths, arrivals and prefixes that come again."""
    sections = [Section("Requests", (_key_figures(view), *length_blocks(view)))]
    sections.append(Section("Arrivals", arrival_blocks(view)))
    reuse: list[Block] = []
    if view.reusable:
        reuse.append(reuse_figure(view.reusable))
        reuse.append(reuse_table(view, None))
    sections.append(Section("Prefix reuse", tuple(reuse) or ("It is not known; see below.",)))
    if view.missing:
        sections.append(Section("Not known", (Bullets(view.missing),)))
    return Page(f"Workload {view.name}", view.summary, tuple(sections))


def length_blocks(view: WorkloadView) -> tuple[Block, ...]:
    """Lengths of prompts and answers, as figures and as one table."""
    known = {"prompt": view.prompts, "output": view.answers}
    figures = [lengths_figure(what, found) for what, found in known.items() if found is not None]
    rows = tuple(_length_row(what, found) for what, found in known.items() if found is not None)
    if not rows:
        return ("Lengths are not known; see below.",)
    columns = (
        Column("tokens"),
        *(Column(name, is_number=True) for name in ("mean", "median", "p95", "p99")),
        Column("most frequent"),
    )
    return (*figures, Table(f"Lengths, {view.counted_by}", columns, rows))


def arrival_blocks(view: WorkloadView) -> tuple[Block, ...]:
    """When requests come."""
    if view.arrivals is None:
        return ("When requests come is not known; see below.",)
    return (arrivals_figure(view.arrivals, view.arrivals_are),)


def reuse_table(view: WorkloadView, block_tokens: int | None) -> Table:
    """The share of prompt tokens that comes again at each block size."""
    about = view.fingerprint is not None and view.fingerprint.sampled
    rows = tuple(
        Row(
            (
                f"{size}{' (the server)' if size == block_tokens else ''}",
                amount(share, "share"),
            )
        )
        for size, share in view.reusable.items()
    )
    caption = "Prompt tokens that come again" + (", estimated from a sample" if about else "")
    return Table(caption, (Column("tokens in a block"), Column("share", is_number=True)), rows)


def _key_figures(view: WorkloadView) -> KeyFigures:
    found = view.fingerprint
    figures = []
    if found is not None:
        figures.append(KeyFigure("requests", f"{found.requests:,}"))
        if found.request_rate_per_s is not None:
            figures.append(KeyFigure("requests a second", amount(found.request_rate_per_s)))
        if found.burstiness is not None:
            figures.append(KeyFigure("burstiness", amount(found.burstiness), "1 is Poisson"))
    for name, lengths in (("mean prompt", view.prompts), ("mean output", view.answers)):
        if lengths is not None and lengths.mean is not None:
            figures.append(KeyFigure(name, f"{digits(lengths.mean)} tokens"))
    if view.reusable:
        size, share = max(view.reusable.items(), key=lambda item: item[1])
        figures.append(
            KeyFigure("comes again", amount(share, "share"), f"in blocks of {size} tokens")
        )
    return KeyFigures(tuple(figures))


def _length_row(what: str, found: Histogram) -> Row:
    statistics = (found.mean, found.p50, found.p95, found.p99)
    most = max(range(len(found.counts)), key=found.counts.__getitem__)
    return Row((what, *(amount(value) for value in statistics), bin_names(found)[most]))
