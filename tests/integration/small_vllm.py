"""A small vLLM in this process, and what it answers."""


def start(model, asked, **engine):
    """An `LLM` whose plugin is asked for this (None: stock), small but for what `engine` says."""
    from vllm import LLM

    return LLM(
        model,
        additional_config={"kvtune": asked} if asked else {},
        distributed_executor_backend="uni",
        **{
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 256 << 20,
            **engine,
        },
    )


def greedy(tokens, **more):
    """How answers of so many tokens are drawn."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def answer(llm, prompts, tokens):
    """What is answered to prompts that come together, text or token ids, each in order.

    `best`: of each token of an answer the best two, [id, log probability]; these tell finer than
    the token what the model saw. `contracts.answers` compares them.
    """
    given = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    done = llm.generate(given, greedy(tokens, logprobs=2), use_tqdm=False)
    answers = [request.outputs[0] for request in done]
    return {
        "prompts": [list(request.prompt_token_ids) for request in done],
        "cached": [request.num_cached_tokens for request in done],
        "ids": [list(one.token_ids) for one in answers],
        "best": [[best_two(of_token) for of_token in one.logprobs] for one in answers],
        "texts": [one.text for one in answers],
    }


def best_two(of_token):
    """Of the log probabilities that vLLM tells of a token."""
    ranked = sorted(of_token.items(), key=lambda each: -each[1].logprob)
    return [[number, told.logprob] for number, told in ranked[:2]]
