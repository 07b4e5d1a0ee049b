"""Runs vLLM in this process with the plugin as asked, and tells what it answers and what it held.

`streaming_engine.py MODEL`, see `vllm_forks`, answers one of

- {"asked": {...} or null, "arguments": {...}, "calls": [[prompt, ...], ...], "tokens": 20,
  "forget": bool}: `calls` are lists of prompts, each answered together, greedily, by so many
  `tokens`. In place of a prompt, null goes on with the first one of the call before. To `forget` is
  to empty the prefix cache after each call.
- {"mask": {"sinks", "window", "page"}, "prompt": text}: the model in plain PyTorch under a mask, in
  which a token sees `sinks` pages, `window` pages before its own, and its own.
"""

from vllm_forks import greedy, serve, start

TOKENS = 20


def answers(model, asked, arguments, calls, tokens=TOKENS, forget=False):
    """What vLLM answers, and what its pool of pages looks like in the end."""
    from kvtune.engines.vllm.plugin.counters import counters

    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    engine = start(model, asked, **{"kv_cache_memory_bytes": 200 << 20, **sizes, **arguments})
    ids, cached, sure, done = [], [], [], []
    for prompts in calls:
        given = [
            {"prompt_token_ids": conversation(done[0])} if prompt is None else prompt
            for prompt in prompts
        ]
        done = engine.generate(given, greedy(tokens, logprobs=1), use_tqdm=False)
        ids.append([list(request.outputs[0].token_ids) for request in done])
        sure.append([logprob_of_first(request.outputs[0]) for request in done])
        cached.append([request.num_cached_tokens for request in done])
        if forget:
            assert engine.reset_prefix_cache()
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    evicted = counters().get("evicted_tokens", cause="window")
    return {
        "ids": ids,
        "sure": sure,
        "cached": cached,
        "prompt": list(done[0].prompt_token_ids),
        "pool": pool.num_gpu_blocks - 1,
        "free": pool.get_num_free_blocks(),
        "evicted": evicted,
    }


def conversation(request):
    """A prompt that goes on with what was asked and answered."""
    prompt = list(request.prompt_token_ids)
    return [*prompt, *request.outputs[0].token_ids, *prompt[:50]]


def logprob_of_first(answer):
    """How sure the model was of its first token, which tells finer than ids what it saw."""
    return answer.logprobs[0][answer.token_ids[0]].logprob


def masked(model, mask, prompt):
    """The ids that the model answers where the mask alone says what a token sees."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt").input_ids
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    answer = []
    with torch.inference_mode():
        for _ in range(TOKENS):
            place = torch.arange(ids.shape[1])
            page = place // mask["page"]
            seen = (page < mask["sinks"]) | (page >= page[:, None] - mask["window"])
            seen &= place <= place[:, None]
            hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            logits = network(ids, attention_mask=hidden[None, None], use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[answer[-1]]])], dim=1)
    return {"ids": answer}


if __name__ == "__main__":
    serve(lambda model, **wanted: (masked if "mask" in wanted else answers)(model, **wanted))
