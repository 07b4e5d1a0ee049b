"""The routes of the simulated server, and the faults it can be told to have."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import replace
from typing import Any

from kvtune import __version__
from kvtune.engines.simulated.blocks import prefix_hashes
from kvtune.engines.simulated.costs import Capacity, refusal
from kvtune.engines.simulated.generation import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    AnswerWriter,
    Refusal,
    read_generation,
    read_json,
    read_prompt,
)
from kvtune.engines.simulated.http import HttpRequest, Reply
from kvtune.engines.simulated.loop import EngineLoop
from kvtune.engines.simulated.options import Settings
from kvtune.engines.vllm.plugin.live_changes import METHOD


class Api:
    """Answers requests. Never raises for what a client sends."""

    def __init__(self, settings: Settings, capacity: Capacity, engine: EngineLoop) -> None:
        self._settings = settings
        self._engine = engine
        self._config = server_config(settings, capacity)
        self._generations = 0
        self._random = random.Random(settings.seed)
        self._started_s = int(time.time())
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/version"): self._version,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", COMPLETIONS_PATH): self._generate,
            ("POST", CHAT_PATH): self._generate,
        }

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request, now or when its tokens are there."""
        if self._engine.is_hung:
            return
        route = self._routes.get((request.method, request.path))
        if route is None:
            known = any(path == request.path for _, path in self._routes)
            status, detail = (405, "Method Not Allowed") if known else (404, "Not Found")
            reply.send_json(status, {"detail": detail})
            return
        try:
            route(request, reply)
        except Refusal as refusal:
            reply.send_json(refusal.status, refusal.payload)

    def _health(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(200)

    def _version(self, request: HttpRequest, reply: Reply) -> None:
        reply.send_json(200, {"version": __version__})

    def _models(self, request: HttpRequest, reply: Reply) -> None:
        name = self._settings.model_name
        card = {
            "id": f"not-{name}" if self._settings.simulate_wrong_model else name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "kvtune",
            "root": self._settings.model,
            "parent": None,
            "max_model_len": self._settings.max_model_len,
        }
        reply.send_json(200, {"object": "list", "data": [card]})

    def _server_info(self, request: HttpRequest, reply: Reply) -> None:
        as_json = request.query.get("config_format", "text") == "json"
        config = self._config if as_json else str(self._config)
        reply.send_json(200, {"vllm_config": config, "vllm_env": {}, "system_env": {}})

    def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        page = "# TYPE python_info gauge\npython_info 1.0\n"
        if not self._settings.disable_log_stats:
            page += self._engine.metrics.render(self._config["cache_config"])
        reply.send(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, request: HttpRequest, reply: Reply) -> None:
        payload = read_json(request.body)
        tokens = read_prompt(payload, is_chat="messages" in payload).tokens
        length = self._settings.max_model_len
        reply.send_json(200, {"count": len(tokens), "max_model_len": length, "tokens": tokens})

    def _reset_prefix_cache(self, request: HttpRequest, reply: Reply) -> None:
        reply.send_json(200, {"success": self._engine.reset_prefix_cache()})

    def _collective_rpc(self, request: HttpRequest, reply: Reply) -> None:
        payload = read_json(request.body)
        if payload.get("method") != METHOD:
            raise Refusal(f"no method {payload.get('method')!r}", 500)
        reply.send_json(200, {"results": [self._change(json.loads(payload["args"][0]))]})

    def _change(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Change the scheduler's limits, and answer, as `engines.vllm.plugin.live_changes` does."""
        started = self._settings
        given = {name.replace("-", "_"): value for name, value in wanted.items()}
        capped = given.pop("max_num_active_seqs")
        known = {name: value for name, value in given.items() if value is not None}
        settings = replace(started, **known, max_num_active_seqs=capped)
        if (
            settings.batch_width > started.batch_width
            or settings.token_budget > started.token_budget
        ):
            return {"refused": "the server was started with smaller buffers"}
        if why := refusal(settings):
            return {"refused": why}
        if not self._engine.change(settings):
            return {"busy": True}
        return {
            "set": {
                "max-num-seqs": settings.batch_width,
                "max-num-active-seqs": settings.active_limit,
                "max-num-batched-tokens": settings.token_budget,
                "long-prefill-token-threshold": settings.long_prefill_token_threshold,
                "scheduler-reserve-full-isl": settings.scheduler_reserve_full_isl,
                "watermark": settings.watermark,
            }
        }

    def _generate(self, request: HttpRequest, reply: Reply) -> None:
        settings = self._settings
        generation = read_generation(request.body, settings, is_chat=request.path == CHAT_PATH)
        self._generations += 1
        if self._is_after(settings.simulate_crash_after_requests):
            _crash(self._generations - 1)
        if self._is_after(settings.simulate_hang_after_requests):
            self._engine.is_hung = True
            return
        if self._random.random() < settings.simulate_error_rate:
            raise Refusal("simulated internal error", 500)
        malformed = self._is_after(settings.simulate_garbage_after)
        writer = AnswerWriter(generation, settings, reply, malformed=malformed)
        tokens = generation.prompt.tokens
        sequence = self._engine.submit(
            len(tokens),
            prefix_hashes(tokens, settings.block_size, generation.cache_salt),
            generation.output_tokens,
            writer.on_token,
            finish_reason=generation.finish_reason,
            max_tokens=generation.max_tokens,
        )
        reply.on_close = lambda: self._engine.drop(sequence)
        writer.open(sequence.number)

    def _is_after(self, limit: int | None) -> bool:
        return limit is not None and self._generations > limit


def _crash(requests: int) -> None:
    sys.stdout.write(f"RuntimeError: simulated crash after {requests} requests\n")
    sys.stdout.flush()
    os._exit(1)


def server_config(settings: Settings, capacity: Capacity) -> dict[str, Any]:
    """What the server says about itself, laid out as vLLM's configuration."""
    return {
        "model_config": {
            "model": settings.model,
            "served_model_name": settings.model_name,
            "dtype": "torch.bfloat16" if settings.dtype == "auto" else f"torch.{settings.dtype}",
            "max_model_len": settings.max_model_len,
            "enforce_eager": settings.enforce_eager,
            "seed": settings.seed,
        },
        "cache_config": {
            "block_size": settings.block_size,
            "cache_dtype": settings.kv_cache_dtype,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "kv_cache_max_concurrency": capacity.concurrency,
            "kv_cache_memory_bytes": capacity.memory_bytes,
            "kv_cache_size_tokens": capacity.tokens,
            "num_gpu_blocks": capacity.blocks,
            "num_gpu_blocks_override": settings.num_gpu_blocks_override,
            "prefix_caching_hash_algo": settings.prefix_caching_hash_algo,
        },
        "scheduler_config": {
            "max_num_seqs": settings.batch_width,
            "max_num_active_seqs": settings.max_num_active_seqs,
            "max_num_batched_tokens": settings.token_budget,
            "enable_chunked_prefill": settings.enable_chunked_prefill,
            "long_prefill_token_threshold": settings.long_prefill_token_threshold,
            "watermark": settings.watermark,
            "scheduler_reserve_full_isl": settings.scheduler_reserve_full_isl,
        },
    }
