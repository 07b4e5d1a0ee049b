"""A program that runs vLLM in forks of its own process, one for each line that it is asked.

vLLM is imported once. A line of standard input is {"program": ..., "wanted": {...}}: the fork tells
in a line what `answers(**wanted)` of that module beside this one returns. `conftest.ask` asks it.
"""

import gc
import importlib
import json
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that pages, pools and layers can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # each fork would compile anew how log probabilities are ranked
}


def serve():
    """Answer line after line until there are no more."""
    import vllm.entrypoints.llm
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # vLLM collects garbage several times in a start, among all that was imported too.
    gc.collect()
    gc.freeze()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some of vLLM prints to where answers go
    for line in sys.stdin:
        asked = json.loads(line)
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(send, "w") as pipe:
                program = importlib.import_module(asked["program"])
                json.dump(program.answers(**asked["wanted"]), pipe)
            os._exit(0)
        os.close(send)
        with os.fdopen(receive) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        print(told or json.dumps({"failed": True}), file=answer, flush=True)


if __name__ == "__main__":
    serve()
