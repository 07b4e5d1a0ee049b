"""vLLM's int8 cache with a scale for each token and head keeps the contract of methods."""

from contracts.method import MethodContract


class TestVllmInt8PerTokenHead(MethodContract):
    samples = ("vllm-int8-per-token-head",)
    stores_each_token_alone = True
