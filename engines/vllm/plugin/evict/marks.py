"""What requests mark to stay, and what became of it: in the engine process and in the front-end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from kvtune.engines.vllm.plugin.asked import asked_of
from kvtune.engines.vllm.plugin.counters import counters
from kvtune.engines.vllm.plugin.evict.orders import runs
from kvtune.errors import BadInput
from kvtune.policies.page_budget import Span
from kvtune.policies.protected_spans import KINDS, SECTION, kept_by_kind, protected_spans

_log = logging.getLogger("vllm.kvtune")


class Marks:
    """The engine process's side: the spans of its requests, and the count of what is kept."""

    def __init__(self, prefix_tokens: int, page_tokens: int) -> None:
        self._prefix_tokens = prefix_tokens
        self._page_tokens = page_tokens
        self._spans: dict[str, Sequence[Span]] = {}
        for kind in KINDS:
            self._count(kind, 0, 0)

    def begin(self, request: Any) -> Sequence[Span]:
        """The spans that a new request marks.

        Front-ends refuse what is wrong. One that does not ask us costs a warning, as an error here
        would end the server.
        """
        try:
            spans = protected_spans(request.kv_transfer_params, request.num_prompt_tokens)
        except BadInput as error:
            _log.warning("Request %s goes unprotected: %s", request.request_id, error.message)
            return ()
        if spans is not None:
            self._spans[request.request_id] = spans
        return spans or ()

    def end(self, request: Any, gone: int) -> dict[str, Any] | None:
        """Count a request that ends without the pages `gone`; what its answer is told of them."""
        spans = self._spans.pop(request.request_id, None)
        if request.num_computed_tokens < request.num_prompt_tokens:
            return None
        size = self._page_tokens
        told = kept_by_kind(
            request.num_prompt_tokens,
            self._prefix_tokens,
            spans or (),
            [(first * size, end * size) for first, end in runs(gone)],
        )
        for kind, (seen, kept) in told.items():
            self._count(kind, seen, kept)
        if spans is None:
            return None
        by_kind = {kind: {"seen": seen, "kept": kept} for kind, (seen, kept) in told.items()}
        return {SECTION: {"span_tokens": by_kind}}

    def _count(self, kind: str, seen: int, kept: int) -> None:
        counters().add("span_tokens", kept, span=kind, kept="yes")
        counters().add("span_tokens", seen - kept, span=kind, kept="no")


def refuse_bad_marks() -> None:
    """Let front-ends of this process answer 400 to what cannot be kept. Idempotent."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if hasattr(original, "kvtune_checks"):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *given: Any, **named: Any) -> Any:
        request = original(self, *given, **named)
        try:
            _check(request, self.vllm_config)
        except BadInput as error:
            raise VLLMValidationError(
                f"kvtune: {error.message}. To fix: {error.fix}.", parameter="kv_transfer_params"
            ) from None
        return request

    process_inputs.kvtune_checks = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def _check(request: Any, vllm_config: Any) -> None:
    from vllm.utils import length_from_prompt_token_ids_or_embeds

    asked = asked_of(vllm_config)
    if asked.page_eviction is None and asked.streaming_llm is None:
        return  # nothing is dropped
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    spans = protected_spans(extra.get("kv_transfer_params"), prompt)
    if spans and asked.streaming_llm is not None:
        raise BadInput(
            "streaming_llm drops pages by their place and cannot keep protected spans",
            fix="protect the start of all requests with protect.prefix_tokens, or serve with "
            "page_eviction",
        )
