"""How the step-time model is put into words."""

from __future__ import annotations

from kvtune.autotune.cli.console import stdout
from kvtune.autotune.cli.results import digits
from kvtune.types import Interval, StepTimeModel

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def print_step_time(model: StepTimeModel | None) -> None:
    """Show what a decode step costs, if that is known."""
    if model is None:
        return
    origin = "the probe" if model.source == "probe" else "the load itself"
    stdout.print(f"\nA decode step costs (from {model.observations:,} steps seen in {origin}):")
    weights = ""
    if model.weight_read_s is not None:
        weights = f", of which reading the weights {_time(model.weight_read_s, model.fixed_s)}"
    stdout.print(f"- {_interval(model.fixed_s)} in any case{weights}", soft_wrap=True)
    stdout.print(f"- {_interval(model.per_sequence_s)} a sequence", soft_wrap=True)
    bandwidth = model.kv_bytes_per_s
    if not model.per_kv_token_s.low:
        speed = "; it cannot be told from nothing"
    elif bandwidth is None:
        speed = ""
    else:
        speed = f", KV read at {digits(bandwidth.estimate / 1e9)} GB/s"
    stdout.print(f"- {_interval(model.per_kv_token_s)} a resident token{speed}", soft_wrap=True)
    error = digits(100 * model.error_share)
    stdout.print(f"[dim]half of the steps are within {error}% of that[/dim]")


def _interval(value: Interval) -> str:
    text = _time(value.estimate, value)
    if value.low is None or value.high is None:
        return text
    return f"{text} ({_time(value.low, value)} to {_time(value.high, value)})"


def _time(seconds: float, like: Interval) -> str:
    """Seconds in the unit that suits an interval."""
    largest = max(like.estimate, like.high or 0.0)
    factor, unit = next((scale for scale in _SCALES if largest >= scale[0]), _SCALES[-1])
    return f"{digits(seconds / factor)} {unit}"
