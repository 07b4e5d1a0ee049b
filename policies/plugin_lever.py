"""What all levers have in common that kvtune's plugin for vLLM serves: one knob, one option of it.

They are offered where the plugin can be asked for them beside all that the user fixed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.plugin_arguments import PROTECTED_TOKENS, asked_by
from kvtune.policies.plugin_clashes import clashes
from kvtune.policies.plugin_config import AFTER_PROMPTS
from kvtune.policies.plugin_levers import why_not_served
from kvtune.policies.settings import settings_of
from kvtune.policies.unscored import unprovable, why_hidden
from kvtune.types import Choice


class PluginLever(Policy):
    """A lever of the plugin.

    `part` is the section of the plugin's request that it fills, and `called` what people call that,
    with its verb.
    Its first argument is set by the knob `knob_name`, in `unit`; the value `off` sets nothing.
    """

    part: ClassVar[str]
    called: ClassVar[str]
    knob_name: ClassVar[str]
    unit: ClassVar[str]
    off: ClassVar[JsonValue]

    @abstractmethod
    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """The values worth trying for this load, wherever they are served; `off` is not one."""

    @abstractmethod
    def unneeded(self, ctx: Context) -> str:
        """Why no value is worth trying for this load; empty when one is."""

    @abstractmethod
    def because(self, ctx: Context) -> str:
        """Why its values are those."""

    @abstractmethod
    def says(self, value: JsonValue) -> str:
        """What a value does, `off` too, in one line."""

    def beside(self, value: JsonValue, ctx: Context) -> dict[str, JsonValue]:
        """Further arguments that a value is served with."""
        return {}

    def supports(self, ctx: Context) -> Support:
        """Refuse where the plugin cannot serve it, or where nothing is to be gained."""
        if ctx.fixed(self.arguments[0]):
            return Support.no(f"{self.arguments[0]} is fixed by --engine-args")
        if getattr(asked_by(ctx.base_arguments), self.part) is not None:
            return Support.no(f"{self.called} fixed by --engine-args")
        if reason := why_not_served(ctx) or self.unneeded(ctx):
            return Support.no(reason)
        if ctx.scores_limit and self.part in AFTER_PROMPTS:
            return Support.no(unprovable(ctx.scores_limit, why_hidden(AFTER_PROMPTS[self.part])))
        refused = self.refused_values(ctx)
        if len(refused) < len(self.wanted(ctx)):
            return Support.yes()
        return Support.no(f"beside what --engine-args fix, {next(iter(refused.values()))}")

    def refused_values(self, ctx: Context) -> dict[str, str]:
        """Name the values that do not go with what the user fixed."""
        reasons = {value: self._clash(value, ctx) for value in self.wanted(ctx)}
        return {f"{self.knob_name}={value}": reason for value, reason in reasons.items() if reason}

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer what is wanted and goes with what the user fixed."""
        found = [value for value in self.wanted(ctx) if not self._clash(value, ctx)]
        if not found:
            return ()
        choices = [self.off, *found]
        numbers = [one for one in choices if isinstance(one, int | float)]
        return (
            Knob.choice(
                self.knob_name,
                sorted(numbers) if len(numbers) == len(choices) else choices,
                default=self.off,
                unit=self.unit,
                because=self.because(ctx),
                named=self.arguments[0],
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set the option under `additional-config`."""
        values = self.complete(parameters, ctx)
        value = values.get(self.knob_name, self.off)
        if value == self.off:
            return self.make_choice(values, {}, self.says(value))
        more = self.beside(value, ctx)
        said = self.says(value)
        if tokens := more.get(PROTECTED_TOKENS):
            said += f"; the first {tokens}, which prompts have in common, stay in any case"
        return self.make_choice(values, {self.arguments[0]: value, **more}, said)

    def _clash(self, value: JsonValue, ctx: Context) -> str:
        """Why the plugin would refuse a value beside what the user fixed; empty: it would not."""
        now = settings_of({**ctx.base_arguments, self.arguments[0]: value}, ctx)
        return next((clash.why for clash in clashes(now.beside)), "")
