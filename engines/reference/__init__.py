"""The reference engine: KV-cache methods on a real model in PyTorch, exact and counted.

Importing it without its extra raises `MissingExtra`.
"""

from importlib.util import find_spec

from kvtune.errors import MissingExtra

for _package in ("torch", "transformers", "safetensors"):
    if find_spec(_package) is None:
        raise MissingExtra(
            f"the reference engine needs {_package}, which is not installed",
            fix="pip install 'kvtune[reference]'",
        )
