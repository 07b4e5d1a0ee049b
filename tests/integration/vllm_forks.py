"""A program that runs vLLM in its own process, once for each line that it is asked.

vLLM is imported once; each line of standard input, a JSON object, is answered with one by a fork of
its own. The side of the tests is `contracts.forks`.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that pages, pools and layers can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
}


def start(model, asked, **engine):
    """An `LLM` whose plugin is asked for this (None: stock), small but for what `engine` says."""
    from vllm import LLM

    return LLM(
        model,
        additional_config={"kvtune": asked} if asked else {},
        distributed_executor_backend="uni",
        enforce_eager=True,
        **{
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


def serve(answers):
    """Answer each line with what `answers(model, **line)` returns."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    model = sys.argv[1]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some of vLLM prints to where answers go
    for line in sys.stdin:
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(send, "w") as pipe:
                json.dump(answers(model, **json.loads(line)), pipe)
            os._exit(0)
        os.close(send)
        with os.fdopen(receive) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        print(told or json.dumps({"failed": True}), file=answer, flush=True)
