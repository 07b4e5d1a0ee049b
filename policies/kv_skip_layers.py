"""Which layers keep keys and values in the model's own format although the rest are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context, Knob, Policy, Support
from kvtune.policies.kv_dtype import FP8, PER_TOKEN_HEAD, KvDtype
from kvtune.policies.kv_dtype import KNOB as DTYPE
from kvtune.policies.settings import base_settings
from kvtune.types import Choice, Harm

KNOB = "kv_cache_dtype_skip_layers"
ENDS = 2
"""Layers kept at each end: as many as vLLM keeps of its own accord under TurboQuant."""

MIXED = (*FP8, *PER_TOKEN_HEAD)
"""The formats that go with layers in another one, and do not choose these themselves."""


class KvSkipLayers(Policy):
    """Keep the first and last layers in full precision, which are thought to lose the most.

    What answers lose lies between that of the format for all layers and nothing; so does what is
    saved.
    """

    name: ClassVar[str] = "kv_skip_layers"
    title: ClassVar[str] = "layers at each end whose keys and values are not quantized"
    harm: ClassVar[Harm] = Harm.NEAR_LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = ("kv-cache-dtype-skip-layers",)

    def supports(self, ctx: Context) -> Support:
        """Refuse where no layer is quantized, or where it is not known how many there are."""
        fixed = super().supports(ctx)
        if not fixed.ok:
            return fixed
        if ctx.engine.platform == "simulated":
            return Support.no("the simulated engine holds all layers alike")
        if ctx.model is None:
            return Support.no("it is not known how many layers the model has")
        if ctx.model.layers <= 2 * ENDS:
            return Support.no(f"a model of {ctx.model.layers} layers has none between its ends")
        if not ctx.fixed("kv-cache-dtype"):
            return KvDtype().supports(ctx)
        held = base_settings(ctx).kv_cache_dtype
        if held not in MIXED:
            return Support.no(f"kv-cache-dtype {held} is fixed, which has no layers to skip")
        return Support.yes()

    def relieves(self, ctx: Context) -> frozenset[str]:
        """The same as the format that it goes with."""
        return KvDtype().relieves(ctx)

    def knobs(self, ctx: Context) -> tuple[Knob, ...]:
        """Offer none and the first and last two, together with a format that is not the model's."""
        if ctx.model is None or ctx.model.layers <= 2 * ENDS:
            return ()
        last = ctx.model.layers - 1
        ends = [*range(ENDS), *range(last - ENDS + 1, last + 1)]
        return (
            Knob(
                KNOB,
                "choice",
                low=None,
                high=None,
                choices=(0, ENDS),
                unit="layers at each end",
                because="the first and last layers are thought to lose the most",
                default=0,
                active_when={DTYPE: MIXED},
                served_as={ENDS: [str(layer) for layer in ends]},
            ),
        )

    def choice(self, parameters: Mapping[str, JsonValue], ctx: Context) -> Choice:
        """Set `kv-cache-dtype-skip-layers`."""
        values = self.complete(parameters, ctx)
        ends = values.get(KNOB, 0)
        if not ends:
            return self.make_choice(values, {}, "all layers are held in the same format")
        (knob,) = self.knobs(ctx)
        because = f"the first and last {ends} layers stay in the model's own format"
        served = (knob.served_as or {})[ENDS]
        return self.make_choice(values, {"kv-cache-dtype-skip-layers": served}, because)
