"""Runs vLLM in this process with the plugin as asked, and tells what it answers and what it held.

`calls` are lists of prompts, each answered together. With a `mask` of `sinks`, `window` and `page`
in place of all that: the model in plain PyTorch, in which a token sees so many pages of sinks, so
many pages before its own, and its own.
"""

from small_vllm import answer, start

TOKENS = 20


def answers(model, asked=None, calls=(), mask=None, prompt=None, **engine):
    """What vLLM answers, greedily, and what its pool of pages looks like in the end."""
    if mask is not None:
        return masked(model, mask, prompt)
    from kvtune.engines.vllm.plugin.counters import counters

    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    llm = start(model, asked, **{**sizes, **engine})
    core = llm.llm_engine.engine_core.engine_core
    schedule, running = core.scheduler.schedule, [0]

    def watched(*given, **named):
        scheduled = schedule(*given, **named)
        running.append(len(core.scheduler.running))
        return scheduled

    core.scheduler.schedule = watched
    done = [answer(llm, prompts, TOKENS) for prompts in calls]
    pool = core.scheduler.kv_cache_manager.block_pool
    return {
        "calls": done,
        "most_running": max(running),
        "told_concurrency": core.vllm_config.cache_config.kv_cache_max_concurrency,
        "pool": pool.num_gpu_blocks - 1,
        "free": pool.get_num_free_blocks(),
        "evicted": counters().get("evicted_tokens", cause="window"),
    }


def masked(model, mask, prompt):
    """The ids that the model answers where the mask alone says what a token sees."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt").input_ids
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    answer, best = [], []
    with torch.inference_mode():
        for _ in range(TOKENS):
            place = torch.arange(ids.shape[1])
            page = place // mask["page"]
            seen = (page < mask["sinks"]) | (page >= page[:, None] - mask["window"])
            seen &= place <= place[:, None]
            hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            logits = network(ids, attention_mask=hidden[None, None], use_cache=False).logits
            two = logits[0, -1].log_softmax(dim=-1).topk(2)
            ranked = zip(two.indices.tolist(), two.values.tolist(), strict=True)
            best.append([list(each) for each in ranked])
            answer.append(best[-1][0][0])
            ids = torch.cat([ids, torch.tensor([[answer[-1]]])], dim=1)
    return {"calls": [{"ids": [answer], "best": [best]}]}
