"""Kubernetes manifests: a Deployment and a Service."""

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
    kubernetes_environment,
    kubernetes_supply,
    kubernetes_volumes,
    memory_request,
    plugin_build,
    plugin_check,
    plugin_image_notes,
    provenance_annotations,
    without_expansion,
)
from kvtune.autotune.emit.header import comment, header
from kvtune.autotune.emit.yaml_text import Noted, to_yaml
from kvtune.types import ServingConfig

_FILE = "kubernetes.yaml"


class Kubernetes(Emitter):
    """One file of two documents, named after the study."""

    name: ClassVar[str] = "kubernetes"
    title: ClassVar[str] = "Kubernetes Deployment and Service"

    def render(self, config: ServingConfig) -> dict[str, str]:
        """`kubernetes.yaml` for `kubectl apply -f`."""
        lines = [
            *_header(config),
            "---",
            *to_yaml(_deployment(config)),
            "---",
            *to_yaml(_service(config)),
        ]
        return {_FILE: "\n".join(lines) + "\n"}


def _header(config: ServingConfig) -> list[str]:
    return header(
        config,
        start=[*plugin_build(config), f"kubectl apply -f {_FILE}"],
        supply=kubernetes_supply(config),
        revert=[f"kubectl rollout undo deployment/{deployment_name(config)}"],
        notes=[*container_notes(config), *plugin_image_notes(config)],
    )


def _labels(config: ServingConfig) -> dict[str, str]:
    return {"app.kubernetes.io/name": deployment_name(config)}


def _metadata(config: ServingConfig) -> dict[str, Any]:
    return {
        "name": deployment_name(config),
        "labels": _labels(config),
        "annotations": provenance_annotations(config),
    }


def _service(config: ServingConfig) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(config),
        "spec": {
            "selector": _labels(config),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def _deployment(config: ServingConfig) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(config),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _labels(config)},
            "strategy": Noted(
                {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                comment(
                    "The old server answers until the new one is ready, which needs room for both "
                    "on the cluster. Without that room, use type: Recreate and drop rollingUpdate."
                ),
            ),
            "template": {
                "metadata": {
                    "labels": _labels(config),
                    "annotations": provenance_annotations(config),
                },
                "spec": _pod(config),
            },
        },
    }


def _pod(config: ServingConfig) -> dict[str, Any]:
    size = "8Gi" if gpu_count(config) else "2Gi"
    volumes, _ = kubernetes_volumes(config)
    check = plugin_check(config)
    first = {"name": "check-plugin", "image": ":".join(image(config)), "command": check}
    return {
        "enableServiceLinks": Noted(
            False,
            comment("A Service called vllm would set VLLM_PORT, which vLLM takes for its own."),
        ),
        **({} if check is None else {"initContainers": [first]}),
        "containers": [_container(config)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
            *volumes,
        ],
    }


def _container(config: ServingConfig) -> dict[str, Any]:
    _, mounts = kubernetes_volumes(config)
    container: dict[str, Any] = {
        "name": "vllm",
        "image": ":".join(image(config)),
        "command": ["vllm", "serve"],
        "args": Noted(
            [without_expansion(word) for word in container_argv(config)],
            comment("Kubernetes replaces $(NAME), so every $ is doubled."),
        ),
    }
    environment = kubernetes_environment(config)
    if environment:
        container["env"] = environment
    container["ports"] = [{"name": "http", "containerPort": PORT}]
    container["resources"] = _resources(config)
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}, *mounts]
    return container | _probes()


def _resources(config: ServingConfig) -> Any:
    if gpu_count(config):
        return {"limits": {"nvidia.com/gpu": gpu_count(config)}}
    return Noted(
        {"requests": {"cpu": 2, "memory": memory_request(config)}},
        comment("A place to start, not a measurement: give it the cores that it should use."),
    )


def _probes() -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10}
    return {
        "startupProbe": Noted(
            {**health, "failureThreshold": START_BUDGET_S // 10},
            comment("Download, load and warm-up may take half an hour."),
        ),
        "readinessProbe": {**health, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": Noted(
            {**health, "timeoutSeconds": 10, "failureThreshold": 6},
            comment("Patient, because a server under full load answers late."),
        ),
    }
