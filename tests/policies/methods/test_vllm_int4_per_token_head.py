"""vLLM's int4 cache with a scale for each token and head keeps the contract of methods."""

from contracts.method import MethodContract


class TestVllmInt4PerTokenHead(MethodContract):
    samples = ("vllm-int4-per-token-head",)
    stores_each_token_alone = True
