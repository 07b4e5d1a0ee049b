"""A Docker Compose file."""

from __future__ import annotations

from typing import Any, ClassVar

from kvtune.autotune.emit.base import Emitter
from kvtune.autotune.emit.containers import (
    PORT,
    START_BUDGET_S,
    container_argv,
    container_notes,
    deployment_name,
    gpu_count,
    image,
    local_paths,
    plugin_image,
    without_expansion,
)
from kvtune.autotune.emit.header import comment, header
from kvtune.autotune.emit.plugin import (
    CONTAINER_PYTHON,
    asks_for_plugin,
    check_command,
    dockerfile,
)
from kvtune.autotune.emit.secret_names import split_environment
from kvtune.autotune.emit.yaml_text import Noted, to_yaml
from kvtune.types import ServingConfig

_FILE = "compose.yaml"
_CACHE = "huggingface-cache"

# Python is in every vLLM image; `http.client` takes no proxy from the environment.
_HEALTH = (
    "import http.client; "
    f"c = http.client.HTTPConnection('127.0.0.1', {PORT}, timeout=5); "
    "c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"
)


class Compose(Emitter):
    """One service, `vllm`, that publishes port 8000."""

    name: ClassVar[str] = "compose"
    title: ClassVar[str] = "Docker Compose file"

    def render(self, config: ServingConfig) -> dict[str, str]:
        """`compose.yaml` for `docker compose up`."""
        paths = local_paths(config)
        document: dict[str, Any] = {
            "name": deployment_name(config),
            "services": {"vllm": _service(config, paths)},
        }
        if not paths:
            document["volumes"] = {_CACHE: {}}
        lines = [*_header(config), "", *to_yaml(document)]
        return {_FILE: "\n".join(lines) + "\n"}


def _header(config: ServingConfig) -> list[str]:
    _, secret = split_environment(config)
    return header(
        config,
        start=[f"docker compose -f {_FILE} up -d"],
        supply=[f"export {name}=..." for name in secret],
        revert=[f"docker compose -f {_FILE} down"],
        notes=container_notes(config),
    )


def _service(config: ServingConfig, paths: tuple[str, ...]) -> dict[str, Any]:
    service: dict[str, Any] = {
        **_image(config),
        "command": Noted(
            [without_expansion(word) for word in container_argv(config)],
            comment("Compose replaces $NAME, so every $ is doubled."),
        ),
    }
    environment = _environment(config)
    if environment:
        service["environment"] = environment
    service["ports"] = [f"{PORT}:{PORT}"]
    service["volumes"] = _volumes(paths)
    if gpu_count(config):
        service["ipc"] = Noted(
            "host", comment("The processes of the server exchange tensors in shared memory.")
        )
        device = {"driver": "nvidia", "count": gpu_count(config), "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    else:
        service["shm_size"] = "4gb"
    service["healthcheck"] = {
        "test": ["CMD", "python3", "-c", _HEALTH],
        "interval": "10s",
        "timeout": "10s",
        "retries": 6,
        "start_period": f"{START_BUDGET_S}s",
    }
    service["restart"] = "unless-stopped"
    return service


def _image(config: ServingConfig) -> dict[str, Any]:
    """The image and what is run in it; one with the plugin is built here."""
    published = ":".join(image(config))
    if not asks_for_plugin(config):
        return {"image": published, "entrypoint": ["vllm", "serve"]}
    checked = f'{check_command(config, CONTAINER_PYTHON)}; exec vllm serve "$@"'
    return {
        "image": plugin_image(config),
        "build": Noted(
            {"dockerfile_inline": without_expansion(dockerfile(config, published))},
            comment("Built at the first start: the published image with kvtune's plugin."),
        ),
        "entrypoint": Noted(
            ["sh", "-c", without_expansion(checked), "vllm"],
            comment("Stops where the plugin is missing; vLLM alone would not say so."),
        ),
    }


def _environment(config: ServingConfig) -> dict[str, str]:
    plain, secret = split_environment(config)
    values = {name: without_expansion(value) for name, value in plain.items()}
    return values | {name: f"${{{name}:?set {name} before you start}}" for name in secret}


def _volumes(paths: tuple[str, ...]) -> list[Any]:
    if not paths:
        cache = {"type": "volume", "source": _CACHE, "target": "/root/.cache/huggingface"}
        return [Noted(cache, comment("Keeps the downloaded model across restarts."))]
    return [
        {
            "type": "bind",
            "source": without_expansion(path),
            "target": without_expansion(path),
            "read_only": True,
            "bind": Noted({"create_host_path": False}, comment("Fail when the path is missing.")),
        }
        for path in paths
    ]
