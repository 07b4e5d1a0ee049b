"""Host memory and disk behind vLLM's prefix cache: pages are loaded again instead of computed.

    vllm serve MODEL --additional-config '{"kvtune": {"tiers": {"host_bytes": 4000000000,
        "disk_bytes": 50000000000, "disk_path": "/var/cache/kv"}}}'

It is a KV connector of vLLM's (`connector`), which the front-end enters into the configuration. The
engine process decides (`planner`, `placement`): what is kept, where, and who leaves. The worker
moves bytes (`mover`, `pages`, `files`): a page to host memory once it is computed, from there to a
file, and back. `identity` is what content must have in common to be exchanged at all.

Why a connector of its own, and not an `OffloadingSpec` under vLLM's `OffloadingConnector` (0.32):
that one asserts that every transfer succeeds, so that a damaged file would end the server; and it
keeps each full page of a request, also those that were computed with a part of the context only and
that the prefix cache never sees. Here what the prefix cache publishes is kept, and nothing else.

Loads are asynchronous ones in vLLM's sense: a request waits, its pages are published when their
content is there, and pages that could not be read are computed. Of a synchronous load, pages are
published before anybody knows whether they can be read.
"""
