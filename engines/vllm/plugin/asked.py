"""What the server of this process is asked to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig, plugin_config


def asked_of(vllm_config: Any) -> PluginConfig:
    """The plugin's section of a `VllmConfig`; all is off where there is none.

    Raises:
        BadInput: the section is not what `PluginConfig` describes.
    """
    return plugin_config(getattr(vllm_config, "additional_config", None))


@contextlib.contextmanager
def telling_fixes() -> Iterator[None]:
    """Let a traceback, which is all that vLLM shows of an error, end with what to do."""
    try:
        yield
    except BadInput as error:
        error.add_note(f"To fix: {error.fix}.")
        raise
