"""What can be done to a KV cache: one lever a file, each an implementation of `base.Policy`.

A lever is here when it can raise goodput without changing what a client is sent. Some options look
like levers and are left out on purpose:

- `enforce-eager`: compiling is the default and only ever faster once started; eager buys a quicker
  start, which is the user's call and belongs in `--engine-args`.
- `async-scheduling`: on wherever it works, and forced off on CPU.
- `stream-interval`: groups tokens into fewer messages, which flatters the gaps between tokens while
  the user waits as long as before.
- `max-num-queued-reqs`, `max-num-queued-tokens`: answer with 503 what was asked for.
- `scheduling-policy`: `priority` needs priorities that requests do not carry.
- `performance-mode`: `throughput` doubles the two batch limits, which are levers themselves.
- `kv-cache-memory-bytes`, `num-gpu-blocks-override`: how much memory there is for the pool is the
  user's to say, and a smaller pool never serves more.
- `attention-backend`: ignored without a word on CPU, and chosen by the engine elsewhere.
"""
