"""Page eviction: free the pages of requests that are looked at least.

    vllm serve MODEL --additional-config '{"kvtune": {"page_eviction": {"budget_tokens": 1024}}}'

Only the worker can score pages, and only the engine process can free them. They talk over a KV
connector of vLLM's (`connector`), which the front-end enters into the configuration; it transfers
no KV. With each step go `orders` to the worker: which rows' queries score, and what rows do not see
any more. With the step's result come the pages to drop. `ledger` is the engine process's account.

The worker is told of a row by its tail, the page of the row's last token. Requests share published
pages, but a page that is being written has one owner, so a tail names a request within a step.

In the worker, `steps` reads the orders when a step's metadata is built, `keys` reads keys back from
the cache, `scores` adds up what queries attend to, and `choice` ranks pages by it. `marks` is what
requests want to stay.

What a token sees is a function of its place and of the decisions: a request that is preempted and
computed again keeps them, no query scores twice, and a chunk that reaches over the places where
pages left becomes several rows. Published to the prefix cache is what comes before the first of
them, which is computed with all pages. A hit is cut so that the queries that score, which a cache
does not hold, are computed.
"""
