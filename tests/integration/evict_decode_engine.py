"""Runs vLLM in this process with page eviction as asked, and tells which pages requests lost when.

`requests` come together: {"prompt": text or token ids, "marks": spans or None}. All that run are
preempted when one of them has `preempted_at` tokens of its answer.
"""

from small_vllm import greedy, start


def answers(model, asked, requests, tokens, engine, preempted_at=None):
    """What is answered, greedily, and what became of each request's pages."""
    from vllm.exceptions import VLLMValidationError

    llm = start(model, asked, **engine)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, connector = scheduler.kv_cache_manager.block_pool, scheduler.connector
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    names, evictions, most_held, preempted = [], {}, {}, []
    begin, end = connector.on_new_request, connector.request_finished_all_groups
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def on_new_request(request):
        names.append(request.request_id)
        begin(request)

    def finished(request, *rest):
        found = connector.ledger.evictions.get(request.request_id, ())
        evictions[request.request_id] = [[each.first_token, each.mask] for each in found]
        return end(request, *rest)

    def watched(*given, **named):
        if not preempted and preempted_at in [each.num_output_tokens for each in scheduler.running]:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        scheduled = schedule(*given, **named)
        for request in scheduler.running:
            if request.num_output_tokens:
                held = sum(not page.is_null for page in manager.req_to_blocks[request.request_id])
                most_held[request.request_id] = max(held, most_held.get(request.request_id, 0))
        return scheduled

    def _preempt_request(request, *rest, **named):
        preempted.append(request.num_output_tokens)
        preempt(request, *rest, **named)

    connector.on_new_request, connector.request_finished_all_groups = on_new_request, finished
    scheduler.schedule, scheduler._preempt_request = watched, _preempt_request
    draws = [greedy(tokens, logprobs=2, extra_args=extra(each)) for each in requests]
    given = [
        each["prompt"] if isinstance(each["prompt"], str) else {"prompt_token_ids": each["prompt"]}
        for each in requests
    ]
    try:
        done = llm.generate(given, draws, use_tqdm=False)
    except VLLMValidationError as error:
        return {"refused": str(error)}
    from small_vllm import best_two

    from kvtune.engines.vllm.plugin.counters import counters

    return {
        "prompts": [list(request.prompt_token_ids) for request in done],
        "ids": [list(request.outputs[0].token_ids) for request in done],
        "best": [[best_two(each) for each in request.outputs[0].logprobs] for request in done],
        "told": [request.kv_transfer_params for request in done],
        "evictions": [evictions[name] for name in names],
        "most_held": [most_held[name] for name in names],
        "preempted": preempted,
        "lost_pages": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "span_tokens": {
            span: [counters().get("span_tokens", span=span, kept=kept) for kept in ("yes", "no")]
            for span in ("prefix", "marked", "rest")
        },
    }


def extra(request):
    """How a client marks spans."""
    if request.get("marks") is None:
        return None
    return {"kv_transfer_params": {"kvtune": {"protected_spans": request["marks"]}}}
