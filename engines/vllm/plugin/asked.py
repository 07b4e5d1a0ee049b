"""What the server of this process is asked to do."""

from __future__ import annotations

from typing import Any

from kvtune.policies.plugin_config import PluginConfig, plugin_config


def asked_of(vllm_config: Any) -> PluginConfig:
    """The plugin's section of a `VllmConfig`; all is off where there is none.

    Raises:
        BadInput: the section is not what `PluginConfig` describes.
    """
    return plugin_config(getattr(vllm_config, "additional_config", None))
