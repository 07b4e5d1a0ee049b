"""How the step-time model is put into words."""

from __future__ import annotations

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.words import digits, duration, span
from kvtune.types import StepTimeModel


def print_step_time(model: StepTimeModel | None) -> None:
    """Show what a decode step costs, if that is known."""
    if model is None:
        return
    origin = "the probe" if model.source == "probe" else "the load itself"
    stdout.print(f"\nA decode step costs (from {model.observations:,} steps seen in {origin}):")
    weights = ""
    if model.weight_read_s is not None:
        weights = f", of which reading the weights {duration(model.weight_read_s, model.fixed_s)}"
    stdout.print(f"- {span(model.fixed_s)} in any case{weights}", soft_wrap=True)
    stdout.print(f"- {span(model.per_sequence_s)} a sequence", soft_wrap=True)
    bandwidth = model.kv_bytes_per_s
    if not model.per_kv_token_s.low:
        speed = "; it cannot be told from nothing"
    elif bandwidth is None:
        speed = ""
    else:
        speed = f", KV read at {digits(bandwidth.estimate / 1e9)} GB/s"
    stdout.print(f"- {span(model.per_kv_token_s)} a resident token{speed}", soft_wrap=True)
    error = digits(100 * model.error_share)
    stdout.print(f"[dim]half of the steps are within {error}% of that[/dim]")
