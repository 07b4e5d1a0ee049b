"""The reference engine: KV-cache methods on a real model in PyTorch, exact and counted."""
