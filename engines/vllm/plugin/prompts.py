"""Which tokens of a step are of answers.

A request that was preempted has its prompt and what it answered computed again as one text. vLLM
tells builders whether a row begins within its prompt, and its model runner knows where that ends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kvtune.engines.vllm.plugin.rows import host_lengths

_told: Tensor | None = None


def listen() -> None:
    """Have this process's model runners say how long prompts are. Idempotent.

    On a vLLM whose runners are of another shape nobody says it.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "_build_attention_metadata", None)
    if original is None or hasattr(original, "kvtune_listens"):
        return

    @functools.wraps(original)
    def build(self: Any, *given: Any, **named: Any) -> Any:
        global _told
        # Rows of a batch that is split are not in the runner's order, and a dry run has none.
        if named.get("num_scheduled_tokens") and named.get("ubatch_slices") is None:
            _told = self.input_batch.num_prompt_tokens_cpu_tensor
        try:
            return original(self, *given, **named)
        finally:
            _told = None

    build.kvtune_listens = True  # type: ignore[attr-defined]
    GPUModelRunner._build_attention_metadata = build


def answers(common: Any) -> Tensor | None:
    """Which tokens of a step are of answers and not of prompts, [tokens], on the host.

    `common` is the `CommonAttentionMetadata` that vLLM made, with a row for each request. None
    where it does not say. Where no runner says how long prompts are, what is computed again is
    taken for a prompt, unless it comes as a single token.
    """
    if common.is_prefilling is None:
        return None
    starts: Tensor = common.query_start_loc_cpu.long()
    queries = starts.diff()
    rows = torch.repeat_interleave(queries)
    if _told is None:
        prompts: Tensor = common.is_prefilling.cpu()
        return ((queries == 1) & ~prompts)[rows]
    places = torch.arange(len(rows)) + (host_lengths(common).long() - starts[1:])[rows]
    found: Tensor = places >= _told[: len(queries)].long()[rows]
    return found
