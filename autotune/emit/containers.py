"""What the three container formats share: image, port, mounts, names and resources."""

from __future__ import annotations

import hashlib
import re
import shlex
from math import prod
from pathlib import PurePosixPath
from typing import Any

from kvtune.autotune.emit.base import config_fingerprint, engine_arguments
from kvtune.autotune.emit.header import comment, one_line
from kvtune.autotune.emit.plugin import (
    CONTAINER_PYTHON,
    PLUGINS,
    asks_for_plugin,
    check_command,
    dockerfile,
)
from kvtune.autotune.emit.secret_names import split_environment
from kvtune.autotune.emit.yaml_text import Noted
from kvtune.engines.vllm.arguments import to_argv
from kvtune.errors import BadInput
from kvtune.types import ServingConfig

PORT = 8000
START_BUDGET_S = 1800
_SECRET_OBJECT = "kvtune-secrets"

# Where the measured server listened says nothing of where a container has to.
_BINDING = frozenset({"host", "port", "uds"})
_PATH_ARGUMENTS = ("tokenizer", "chat-template", "hf-config-path", "generation-config")
_RELEASE = re.compile(r"\d+(\.\d+)+(\.post\d+|rc\d+)?")
_GIB = 2**30


def container_arguments(config: ServingConfig) -> dict[str, Any]:
    """The engine arguments for a server that listens on port 8000 of all interfaces."""
    arguments = engine_arguments(config)
    return {name: value for name, value in arguments.items() if name not in _BINDING}


def container_argv(config: ServingConfig) -> list[str]:
    """The words after `vllm serve` inside a container."""
    return [config.model, *to_argv(container_arguments(config))]


def image(config: ServingConfig) -> tuple[str, str]:
    """Repository and tag of vLLM's published image of the measured version."""
    repository = "vllm/vllm-openai-cpu" if config.device.kind == "cpu" else "vllm/vllm-openai"
    return repository, f"v{_public_version(config)}"[:128]


def container_notes(config: ServingConfig) -> list[str]:
    """What a person has to know before they use a container file."""
    repository, tag = image(config)
    notes = [
        f"The image {repository}:{tag} is vLLM's published build of the measured version. "
        "kvtune did not measure this image: its torch, drivers and kernels may differ."
    ]
    if _RELEASE.fullmatch(_public_version(config)) is None:
        notes.append(
            f"vLLM {config.engine.version} is not a release, so no such image may exist: "
            "build one and name it below."
        )
    left_out = sorted(_BINDING & engine_arguments(config).keys())
    if left_out:
        notes.append(
            f"Left out: {', '.join('--' + name for name in left_out)} of the measured server. "
            f"The container listens on port {PORT}."
        )
    return notes


def plugin_check(config: ServingConfig) -> list[str] | None:
    """The command of a container that ends well where its image has the plugin; None: no need."""
    if not asks_for_plugin(config):
        return None
    # The container of the check has the image's environment, but not that of the server.
    plain, _ = split_environment(config)
    named = f"{PLUGINS}={shlex.quote(plain[PLUGINS])} " if PLUGINS in plain else ""
    check = check_command(config, f"{named}{CONTAINER_PYTHON}")
    return ["sh", "-c", without_expansion(check)]


def plugin_image(config: ServingConfig) -> str:
    """The name that an image with the plugin gets where nobody chose one."""
    return f"vllm-kvtune:{image(config)[1]}"


def plugin_build(config: ServingConfig) -> list[str]:
    """The commands that make an image with the plugin where a cluster finds it; none: no need."""
    if not asks_for_plugin(config):
        return []
    lines = shlex.join(dockerfile(config, ":".join(image(config))).splitlines())
    name = f"YOUR_REGISTRY/{plugin_image(config)}"
    return [f"printf '%s\\n' {lines} | docker build -t {name} -", f"docker push {name}"]


def plugin_image_notes(config: ServingConfig) -> list[str]:
    """What to do with that image."""
    if not asks_for_plugin(config):
        return []
    return [
        f"The image {':'.join(image(config))} has no kvtune: build one that has, see below, and "
        "put its name in the place of this one. Until then a first container stops the start."
    ]


def local_paths(config: ServingConfig) -> tuple[str, ...]:
    """Absolute paths on the host that the server reads; each is mounted at the same path.

    Raises:
        BadInput: the model is a relative path.
    """
    if config.model.startswith((".", "~")):
        raise BadInput(
            f"the model {config.model!r} is a relative path, which means nothing in a container",
            "tune with the absolute path of the model, or emit the formats shell or vllm-yaml",
        )
    arguments = engine_arguments(config)
    wanted = [config.model, *(str(arguments.get(name, "")) for name in _PATH_ARGUMENTS)]
    paths: list[str] = []
    for path in wanted:
        inside = any(PurePosixPath(path).is_relative_to(parent) for parent in paths)
        if path.startswith("/") and not inside:
            paths.append(path)
    return tuple(paths)


def deployment_name(config: ServingConfig) -> str:
    """A DNS label, never a number, for all deployments of one study.

    27 characters at most: the Helm chart adds the release's name and up to 16 of its own to it, and
    a label ends at 63.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", config.study.lower()).strip("-")
    if slug != config.study or not 0 < len(slug) <= 20:
        # Names that only differ in what a label cannot hold must not collide.
        slug = f"{slug[:11].strip('-')}-{hashlib.sha256(config.study.encode()).hexdigest()[:8]}"
    return "kvtune-" + slug.strip("-")


def provenance_annotations(config: ServingConfig) -> dict[str, str]:
    """Where a deployed object comes from, as Kubernetes annotations."""
    values = {
        "kvtune/study": config.study,
        "kvtune/trial": str(config.trial),
        "kvtune/fingerprint": config_fingerprint(config),
        "kvtune/outcome": "picked-by-hand" if config.outcome is None else config.outcome.value,
        "kvtune/version": config.kvtune_version,
    }
    return {key: one_line(value)[:200] for key, value in values.items()}


def without_expansion(text: str) -> str:
    """`text` for Kubernetes' `command`, `args` and `env`, or for Compose: `$$` stands for `$`.

    Both collapse every `$$`, not only those before a name, so each `$` has to be doubled.
    """
    return text.replace("$", "$$")


def kubernetes_environment(config: ServingConfig) -> list[dict[str, Any]]:
    """The `env` of a container; secrets are read from the Secret `kvtune-secrets`."""
    plain, secret = split_environment(config)
    values: list[dict[str, Any]] = [
        {"name": name, "value": without_expansion(value)} for name, value in plain.items()
    ]
    for name in secret:
        reference = {"secretKeyRef": {"name": _SECRET_OBJECT, "key": name}}
        values.append({"name": name, "valueFrom": reference})
    return values


def kubernetes_supply(config: ServingConfig) -> list[str]:
    """The commands that put the secrets where `kubernetes_environment` looks for them."""
    _, secret = split_environment(config)
    literals = "".join(f" --from-literal={name}=..." for name in secret)
    return [f"kubectl create secret generic {_SECRET_OBJECT}{literals}"]


def kubernetes_volumes(config: ServingConfig) -> tuple[list[Noted], list[dict[str, Any]]]:
    """Volumes of a pod and mounts of its container for the local paths."""
    note = comment(
        "This path has to exist on every node that may run the pod. To serve from a claim "
        "instead, replace hostPath by persistentVolumeClaim with your claimName."
    )
    paths = dict(enumerate(local_paths(config)))
    volumes = [
        Noted({"name": f"local-{index}", "hostPath": {"path": path}}, note)
        for index, path in paths.items()
    ]
    mounts: list[dict[str, Any]] = [
        {"name": f"local-{index}", "mountPath": path, "readOnly": True}
        for index, path in paths.items()
    ]
    return volumes, mounts


def gpu_count(config: ServingConfig) -> int:
    """How many GPUs the server needs: the product of its parallel sizes."""
    if config.device.kind != "cuda":
        return 0
    values = {setting.name: setting.value for setting in config.settings}
    return prod(
        size
        for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
        if isinstance(size := values.get(name, 1), int)
    )


def memory_request(config: ServingConfig) -> str:
    """Host memory to ask for: half of the measured machine's on a CPU, else 16 GiB."""
    known = config.device.memory_bytes
    if config.device.kind == "cuda" or known is None:
        return "16Gi"
    return f"{max(1, known // 2 // _GIB)}Gi"


def _public_version(config: ServingConfig) -> str:
    """The version without its local part (`+cpu`), in characters that a tag may hold."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", config.engine.version.split("+")[0])
