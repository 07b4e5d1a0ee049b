"""A tiered store of caches: device, host memory, disk (Mooncake, arXiv 2407.00079)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from kvtune.errors import BadInput
from kvtune.policies.footprint import stored_bytes
from kvtune.policies.method import (
    REFERENCE,
    Axis,
    LayerShape,
    Method,
    Paper,
    Saves,
    Serving,
)
from kvtune.policies.method_stack import MethodStack
from kvtune.types import Harm


class Tiers(Method):
    """Keep what leaves the device in host memory, then on disk, and load it where that is faster.

    With prefix caching in the stack, blocks that leave its cache go to the host, and from a full
    host to the disk. A prompt loads the leading blocks that this gets ready soonest: bytes over
    the measured speed of each tier against measured seconds of prefill a token. Whole sequences
    can be moved out and back by name (`engines.reference.tiers`). On a CPU the device and the host
    are the same memory, so that moving to the host there shows the mechanism, not a saving.

    Only keys and values move. Scores, summaries and positions stay on the device.
    """

    name = "tiers"
    title = "Mooncake"
    axis = Axis.PLACEMENT
    harm = Harm.LOSSLESS
    saves = (Saves.CAPACITY, Saves.PREFILL)
    acts = "both"
    serving = (
        REFERENCE,
        Serving("vllm", "--kv-offloading-size, --kv-offloading-backend native", "0.32", ("cuda",)),
        Serving("kvtune-plugin", "vLLM 0.32, --additional-config.kvtune.tiers", platforms=("cpu",)),
    )
    paper = Paper(
        "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving",
        "2407.00079",
        2024,
    )
    summary = (
        "Moves caches to host memory and disk and loads them again where that beats computing "
        "them; costs the bandwidth of the links."
    )

    host_bytes: int = Field(default=1 << 30, ge=0)
    disk_bytes: int = Field(default=0, ge=0)
    folder: str = ""
    eviction: Literal["lru", "arc"] = "lru"

    @model_validator(mode="after")
    def _folder_for_files(self) -> Tiers:
        if self.disk_bytes and not self.folder:
            raise ValueError("disk_bytes needs a folder to put files into")
        return self

    @property
    def publish(self) -> Literal["plain", "fingerprint", "never"]:
        """Where bytes lie does not change what they are."""
        return "plain"

    def block_bytes(
        self, stack: MethodStack, layers: Sequence[LayerShape], block_tokens: int
    ) -> int:
        """Bytes that a prefix block of `block_tokens` takes on a tier, under a stack.

        Raises:
            BadInput: a store of the stack does not keep tokens one by one.
        """
        if any(not (store.each_token_alone and store.one_page_kind) for store in stack.stores):
            raise BadInput(f"{stack} keeps tokens in groups or in two forms: no blocks can move")
        moved = MethodStack(
            tuple(method for method in stack.methods if method.axis is not Axis.PLACEMENT)
        )
        return stored_bytes(moved, layers, block_tokens)
