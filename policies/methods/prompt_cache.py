"""Prompt Cache: parts of prompts computed once, wherever they stand (arXiv 2311.04934)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from kvtune.policies.footprint import stored_bytes
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    LayerShape,
    Method,
    Need,
    Paper,
    Saves,
)
from kvtune.policies.method_stack import MethodStack
from kvtune.types import Harm


class PromptCache(Method):
    """Compute the modules of a schema once, and only arguments and free text for each prompt.

    A module is encoded by itself at its positions in the schema (`policies.prompt_schema`), so
    that it does not see the modules before it: that is the loss. Modules of a scaffold are encoded
    in one pass, and see each other. A parameter holds its positions with `placeholder_id` while its
    module is encoded; what a prompt fills in is computed at these positions. Free text follows the
    last position of the prompt's modules.

    `arguments_see` `everything` lets arguments attend to all cached modules, those after them too,
    as the paper's code does; `before` only to what stands before them. Text follows everything and
    sees it in any case.

    Positions may have gaps: 4 bytes a token and layer are held for them. Modules are stored as the
    stack stores tokens; it must store each one by itself and drop none. In the reference engine
    sequences own copies of their modules (full blocks of pages excepted).
    """

    name = "prompt-cache"
    title = "Prompt Cache"
    axis = Axis.REUSE
    harm = Harm.LOSSY
    saves = (Saves.PREFILL, Saves.CAPACITY)
    acts = "prefill"
    needs = (Need.SCHEMA,)
    leaves_gaps: ClassVar[bool] = True
    serving = (REFERENCE,)
    paper = Paper(
        "Prompt Cache: Modular Attention Reuse for Low-Latency Inference", "2311.04934", 2023
    )
    summary = (
        "Reuses parts of prompts in any combination, which saves their prefill; costs their "
        "memory, a schema, and attention between parts that are not encoded together."
    )

    placeholder_id: int = Field(default=0, ge=0)
    arguments_see: Literal["everything", "before"] = "everything"

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """A module is not the prefix that its tokens would be."""
        return "never"

    def module_bytes(self, stack: MethodStack, layers: Sequence[LayerShape], tokens: int) -> int:
        """Bytes of `tokens` tokens of modules under a stack that does not page them."""
        return stored_bytes(stack, layers, tokens)
