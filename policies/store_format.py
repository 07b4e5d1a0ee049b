"""In how many bits keys and values are held: the quantized stores of kvtune's plugin for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import JsonValue

from kvtune.policies.base import Context
from kvtune.policies.plugin_arguments import STORE_FORMAT
from kvtune.policies.plugin_config import StoreConfig
from kvtune.policies.plugin_lever import PluginLever
from kvtune.policies.store_bytes import cell_bytes
from kvtune.types import Harm

KNOB = "store_format"
NEAR_LOSSLESS = ("int8",)
"""Greedy answers to prompts of up to 1,000 tokens are those of stock vLLM, token by token (SmolLM2
in float32, tests/integration/test_plugin_store.py). Fewer bits lose what a mean does not show."""

FORMATS = (*NEAR_LOSSLESS, "int4", "turboquant", "kivi")


class StoreFormat(PluginLever):
    """Hold keys and values in 8 bits or 4: more tokens in the same memory, for slower steps.

    Each step reads back to full precision what it attends to.
    """

    name: ClassVar[str] = "store_format"
    title: ClassVar[str] = "quantized store of keys and values"
    harm: ClassVar[Harm] = Harm.NEAR_LOSSLESS
    saves: ClassVar[str] = "capacity"
    arguments: ClassVar[tuple[str, ...]] = (STORE_FORMAT,)
    part: ClassVar[str] = "store"
    called: ClassVar[str] = "a store is"
    knob_name: ClassVar[str] = KNOB
    unit: ClassVar[str] = ""
    off: ClassVar[JsonValue] = "none"

    def harm_of(self, parameters: Mapping[str, JsonValue]) -> Harm:
        """Four bits are lossy."""
        is_mild = parameters.get(KNOB, self.off) in (self.off, *NEAR_LOSSLESS)
        return self.harm if is_mild else Harm.LOSSY

    def wanted(self, ctx: Context) -> tuple[JsonValue, ...]:
        """All formats, those of more bits first; each is smaller than 16 bits a channel."""
        return FORMATS

    def unneeded(self, ctx: Context) -> str:
        """Wherever the pool is what binds, it may help; the verdict says that."""
        return ""

    def because(self, ctx: Context) -> str:
        """Say what a token takes in each format."""
        each = "" if ctx.model is None else f": {_sizes(ctx.model.head_dim)} bytes a token and head"
        return f"fewer bits hold more tokens, and steps take longer that read them back{each}"

    def says(self, value: JsonValue) -> str:
        """Say what a format gives and costs."""
        if value == self.off:
            return "keys and values as the server's own cache holds them"
        bits = "8 bits" if value == "int8" else "4 bits"
        return (
            f"keys and values in {bits} ({value}): more tokens in the same memory, and each step "
            "reads back to full precision what it attends to"
        )


def _sizes(head_dim: int) -> str:
    sizes = (f"{name} {cell_bytes(StoreConfig(format=name), head_dim)}" for name in FORMATS)
    return ", ".join(sizes)
