"""Runs vLLM in this process, compiled or not, with the plugin as asked, and tells what it answers.

`cache`: a folder in which what is compiled is found by those that compile the same.
"""

import os

from small_vllm import answer, start

TOKENS = 12
COUNTED = ("pages_seen", "pages_read", "kv_bytes_stored", "kv_bytes_read")


def answers(model, asked, prompts, cache=None):
    """What vLLM answers, greedily, and what its policies did; not compiled without a `cache`."""
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["VLLM_CACHE_ROOT"] = cache
        del os.environ["TORCHDYNAMO_DISABLE"]  # set by `vllm_forks`
    llm = start(model, asked, enforce_eager=cache is None, max_model_len=512, max_num_seqs=4)
    from torch._dynamo.utils import counters as compiled

    # Those of the model: answers will have one more, which ranks log probabilities.
    graphs = compiled["stats"].get("unique_graphs", 0)
    from kvtune.engines.vllm.plugin.counters import counters

    return {
        "calls": [answer(llm, prompts, TOKENS)],
        "graphs": graphs,
        "counted": {name: counters().get(name) for name in COUNTED},
        "evicted": {
            cause: counters().get("evicted_tokens", cause=cause) for cause in ("window", "score")
        },
    }
