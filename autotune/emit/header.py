"""The comments that open every emitted file: provenance, evidence, warnings and the way back.

All formats comment with `#` to the end of the line. Text from outside is shown on one line with
its invisible characters escaped, so nothing in it can end a comment.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence

from kvtune.autotune.emit.base import config_fingerprint, public_settings, revert_command
from kvtune.autotune.emit.plugin import asks_for_plugin, plugin_note
from kvtune.autotune.emit.secret_names import split_environment
from kvtune.engines.vllm.arguments import to_argv
from kvtune.types import EngineInfo, Goal, Interval, Outcome, ServingConfig, Setting

_WIDTH = 98

_OUTCOMES: Mapping[Outcome, str] = {
    Outcome.WINNER: "WINNER: it measured better than the baseline.",
    Outcome.KEEP_BASELINE: (
        "KEEP THE BASELINE: nothing measured better than what you run today. "
        "These are the baseline's settings."
    ),
    Outcome.NO_CLEAR_WINNER: (
        "NO CLEAR WINNER: the difference from the baseline is within the noise. "
        "To deploy this is a choice, not a finding."
    ),
    Outcome.INFEASIBLE: (
        "INFEASIBLE: no measured config meets the goal, and this one does NOT meet it either. "
        "It is only the closest one found."
    ),
    Outcome.NOTHING_MEASURED: (
        "NOTHING WAS MEASURED: there is no evidence at all behind these settings."
    ),
}

_PICKED_BY_HAND = (
    "PICKED BY HAND: the study does not recommend this trial. The figures are from the search, "
    "where each configuration was measured once, one after another."
)


def one_line(text: str) -> str:
    """`text` on one line: line breaks, control and invisible characters become escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def comment(text: str, *, indent: int = 0, hanging: int = 0) -> list[str]:
    """`text` as comment lines, wrapped between words; a long word stays whole."""
    return textwrap.wrap(
        one_line(text),
        width=_WIDTH,
        initial_indent="# " + " " * indent,
        subsequent_indent="# " + " " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    ) or ["#"]


def header(
    config: ServingConfig,
    *,
    start: Sequence[str],
    supply: Sequence[str],
    revert: Sequence[str] = (),
    notes: Sequence[str] = (),
    settings: bool = True,
) -> list[str]:
    """The comment lines for the top of a file.

    `start` are the commands that use the file, `supply` those that give it its secrets, and
    `revert` those with which the format goes back to what ran before. `settings` are left out
    where the body comments on each of them itself.
    """
    lines = ["# A serving config found by kvtune.", *_outcome(config.outcome)]
    lines += ["#", *_provenance(config)]
    lines += ["#", "# Measured (estimate [low, high], confidence, repeats):", *_figures(config)]
    lines += _warnings(config)
    if settings:
        lines += ["#", "# Settings, and why:", *_settings(config)]
    plugin = [plugin_note(config)] if asks_for_plugin(config) else []
    for note in (*plugin, *notes):
        lines += ["#", *comment(note)]
    _, secret = split_environment(config)
    if secret:
        lines += _commands(f"Secrets are not written here. Supply {', '.join(secret)}:", supply)
    lines += _commands("To start:", start)
    if revert:
        lines += _commands("To take this back:", revert)
    return lines + _commands("The baseline, to go back to:", [revert_command(config)])


def setting_comment(setting: Setting, *, indent: int = 0) -> list[str]:
    """Where one setting comes from and why it has its value."""
    because = setting.because or "no reason was recorded"
    return comment(f"({setting.origin}) {because}", indent=indent)


def _commands(title: str, commands: Sequence[str]) -> list[str]:
    """One comment line a command, to be copied, with a word of caution where it cannot be."""
    lines = ["#", *comment(title)]
    for command in commands:
        shown = one_line(command)
        lines.append(f"#   {shown}")
        if shown != command:
            lines += comment("(Invisible characters are escaped: do not paste this.)", indent=2)
    return lines


def _outcome(outcome: Outcome | None) -> list[str]:
    lines = comment(_PICKED_BY_HAND if outcome is None else _OUTCOMES[outcome])
    if outcome is Outcome.WINNER:
        return lines
    bar = "# " + "!" * 72
    return [bar, *lines, bar]


def _provenance(config: ServingConfig) -> list[str]:
    device = config.device
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.1f} GiB each"
    driver = f", driver {device.driver}" if device.driver else ""
    served = f", served as {config.served_model_name}" if config.served_model_name else ""
    rows = {
        "study": f"{config.study}, trial {config.trial}, config {config_fingerprint(config)}",
        "made": f"{config.created_at} by kvtune {config.kvtune_version}",
        "engine": _engine(config.engine),
        "device": f"{device.count} x {device.name} ({device.kind}){memory}{driver}",
        "model": config.model + served,
        "goal": _goal(config.goal),
    }
    return [
        line
        for label, text in rows.items()
        for line in comment(f"{label + ':':8}{one_line(text)}", hanging=8)
    ]


def _engine(engine: EngineInfo) -> str:
    torch = f"torch {engine.torch}" if engine.torch else "torch version unknown"
    return f"{engine.name} {engine.version} ({engine.distribution}, {engine.platform}), {torch}"


def _goal(goal: Goal) -> str:
    limits = [f"{slo.statistic} {slo.metric} <= {slo.limit_s:g} s" for slo in goal.slos]
    return f"max {goal.objective}" + (" where " + " and ".join(limits) if limits else "")


def _figures(config: ServingConfig) -> list[str]:
    names = [
        *config.figures,
        *(name for name in config.baseline_figures if name not in config.figures),
    ]
    if not names:
        return comment("nothing: no figures were recorded", indent=2)
    rows = [("", "this config", "baseline")]
    for name in names:
        ours, stock = config.figures.get(name), config.baseline_figures.get(name)
        unit = next((figure.unit for figure in (ours, stock) if figure is not None), "")
        label = f"{name} ({unit})" if unit else name
        rows.append((one_line(label), _cell(ours), _cell(stock)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"#   {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
    figures = [*config.figures.values(), *config.baseline_figures.values()]
    methods = sorted({figure.method for figure in figures if figure.method})
    if methods:
        lines += comment("intervals by: " + ", ".join(methods), indent=2)
    return lines


def _cell(figure: Interval | None) -> str:
    if figure is None:
        return "not measured"
    if figure.low is None or figure.high is None:
        return f"{figure.estimate:.4g}, x{figure.repeats} (no interval)"
    return (
        f"{figure.estimate:.4g} [{figure.low:.4g}, {figure.high:.4g}], "
        f"{figure.confidence:.4g}, x{figure.repeats}"
    )


def _warnings(config: ServingConfig) -> list[str]:
    warnings = list(config.warnings)
    if not config.engine.tested:
        warnings.append("kvtune is not tested with this version of the engine.")
    if config.engine.platform == "simulated":
        warnings.append("Measured on a simulated engine: the figures say nothing of a real one.")
    if not warnings:
        return ["#", "# Warnings: none."]
    lines = ["#", "# WARNINGS:"]
    for warning in warnings:
        lines += comment(f"- {one_line(warning)}", indent=2, hanging=2)
    return lines


def _settings(config: ServingConfig) -> list[str]:
    lines: list[str] = []
    for setting in public_settings(config):
        words = shlex.join(to_argv({setting.name: setting.value}))
        lines += [f"#   {one_line(words)}", *setting_comment(setting, indent=6)]
    return lines or comment("none: the engine's own defaults", indent=2)
