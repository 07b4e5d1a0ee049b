"""Runs vLLM in this process with the plugin as asked, and tells what it answers and publishes.

`prompts` are token ids. Each is answered, and then a request goes on with prompt and answer: with
the prefix cache as the first one left it, once more with an empty one, and at last with what a
server leaves that has no rule of what it may publish.
"""

from small_vllm import greedy, start

TOKENS = 70
EVERY = 61
"""Of a page's numbers one in so many is told, which is prime to the sizes of pages and heads."""


def answers(model, asked, prompts, goes_on=True):
    """What vLLM answers, greedily, and what of it others may use; by itself without `goes_on`."""
    llm = start(
        model,
        asked,
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    if not goes_on:
        for prompt in prompts:
            answered(llm, prompt)
        return {"pages": published(llm)}
    (prompt,) = prompts
    first = answered(llm, prompt)
    longer = [*prompt, *first["ids"], *range(500, 540)]
    ruled = answered(llm, longer) | {"pages": published(llm)}
    assert llm.reset_prefix_cache()
    fresh = answered(llm, longer)
    assert llm.reset_prefix_cache()
    from kvtune.engines.vllm.plugin.manager import PolicyManager

    PolicyManager.publishable_tokens = lambda self, request, num_tokens: num_tokens
    again = answered(llm, prompt)
    leaking = answered(llm, longer) | {"pages": published(llm)}
    return {
        "longer": longer,
        "first": [first, again],
        "ruled": ruled,
        "fresh": fresh,
        "leaking": leaking,
    }


def answered(llm, prompt):
    """What is answered to a prompt, and how sure the model is of the first token of it.

    The latter tells finer than ids what the model saw.
    """
    (done,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        greedy(TOKENS, detokenize=False, logprobs=1),
        use_tqdm=False,
    )
    ids = list(done.outputs[0].token_ids)
    sure = done.outputs[0].logprobs[0][ids[0]].logprob
    return {"ids": ids, "sure": sure, "cached": done.num_cached_tokens}


def published(llm):
    """Some numbers of the last layer in each published page, by the hash of its tokens."""
    core = llm.llm_engine.engine_core.engine_core
    last = core.model_executor.driver_worker.worker.model_runner.kv_caches[-1]
    return {
        block.block_hash.hex(): last[block.block_id].flatten()[::EVERY].tolist()
        for block in core.scheduler.kv_cache_manager.block_pool.blocks
        if block.block_hash is not None
    }
