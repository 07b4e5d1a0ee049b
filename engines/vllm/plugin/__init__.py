"""What kvtune adds to a vLLM server: policies that its own options do not have, and live changes.

vLLM loads `register` through the entry point group `vllm.general_plugins` in every process of every
server of an environment that has kvtune. A server asks for policies with

    vllm serve MODEL --additional-config '{"kvtune": {"streaming_llm": {"window_tokens": 1024}}}'

and one that asks for none runs vLLM's own classes. docs/plugin.md is the user's side of it.

How the parts meet, in the order in which a start comes by them:

- `front`: the process that reads the arguments checks what is asked against `refusals`.
- `backend`: each worker takes the stock attention backend, wrapped for what is asked.
- `spec`: what a layer tells vLLM of its KV cache; the engine process sizes and shares memory by it.
- `manager`: the engine process frees pages, and publishes to the prefix cache what is exact only.
- `builder`: once a step, each worker rewrites block tables to what is kept; `rows` is how.
- `self_test`: before the first request, ours and the stock backend are held against each other.

- `counters`, `collector`: what workers and the engine process count, on the server's own /metrics.

Only this package may import vLLM's insides, and only within functions or in modules that `backend`
and `spec` lead to: kvtune itself runs where there is no vLLM.
"""

from __future__ import annotations


def register() -> None:
    """Make this process's vLLM able to be asked. May be called again, and says nothing."""
    # Others need a name or a figure of the parts, and not all that checks what is asked.
    from kvtune.engines.vllm.plugin import front, live_changes

    live_changes.register()
    front.register()
