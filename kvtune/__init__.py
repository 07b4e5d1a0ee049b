"""kvtune: find, prove and emit the KV-cache policy that a vLLM workload needs."""

__version__ = "0.1.0"
